"""Pretrain a policy as a start for GRPO: corpus, training, measurements and card."""
