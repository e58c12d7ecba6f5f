"""The engine for Hugging Face models."""
