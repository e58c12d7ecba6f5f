"""Prompt sets written by a language model: requests, models and accepted prompts."""
