"""How a policy to start GRPO from is made: corpus, training, measurements and card."""
