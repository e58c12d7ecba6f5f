"""Transports of weights from learner to generators. `config/transport_catalog.py` lists them."""
