"""How responses are sampled. `config/engine_catalog.py` lists the engines."""
