"""Environments of Gymnasium in which a small network acts."""
