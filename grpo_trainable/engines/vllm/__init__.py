"""The engine vLLM (extra `vllm`)."""
