"""Pretrain a policy as a starting point for GRPO: corpus, training, measurements and model card."""
