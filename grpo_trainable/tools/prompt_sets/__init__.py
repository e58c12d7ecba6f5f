"""Prompt sets that a language model writes: what is asked, who answers, what is kept."""
