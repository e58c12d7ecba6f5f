"""Rewards from a language model that judges responses by a rubric (`task.reward=judge:FILE`)."""
