"""Models of transformers as policies (extra `hf`)."""
