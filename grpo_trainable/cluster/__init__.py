"""The use of Ray: actors, their bundles, and files on every machine."""
