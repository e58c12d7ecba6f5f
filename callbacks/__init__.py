"""Callbacks of Ray Tune that run beside a GRPO experiment, in the driver's process.

They know the names of metrics, never an actor.
"""
