"""The engine vLLM (extra `vllm`, or `vllm-gpu` for GPUs)."""
