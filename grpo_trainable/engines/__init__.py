"""Engines, which sample responses. `config/engine_catalog.py` lists them."""
