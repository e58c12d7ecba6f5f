"""Adapters that play unmodified environments of other packages as episodes."""
