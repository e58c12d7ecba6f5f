"""Transports that bring the learner's weights to the generators.

`config/transport_catalog.py` lists them.
"""
