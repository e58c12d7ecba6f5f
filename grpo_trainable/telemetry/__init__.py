"""Measurements that a trial takes of itself: the time of each stage, and its machine's load."""
