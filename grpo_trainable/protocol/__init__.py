"""Data that actors exchange: rollouts, messages, calls, weights, and the records of a round."""
