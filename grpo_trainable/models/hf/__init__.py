"""Hugging Face models as policies (extra `hf`)."""
