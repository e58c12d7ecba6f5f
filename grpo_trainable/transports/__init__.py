"""How weights travel. `config/transport_catalog.py` lists the transports."""
