"""How responses are sampled: the interface, and our own engine."""
