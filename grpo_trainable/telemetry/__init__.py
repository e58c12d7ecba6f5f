"""Measurements that a trial takes of itself: stages, clocks, and the load of its machine."""
