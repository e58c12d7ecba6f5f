"""The engine of Hugging Face models."""
