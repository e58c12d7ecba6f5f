"""Policies: transformer, KV cache, sampling, tokenizer, and their storage."""
