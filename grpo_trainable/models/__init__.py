"""The policy: transformer, KV cache, sampling, tokenizer, and how they are stored."""
