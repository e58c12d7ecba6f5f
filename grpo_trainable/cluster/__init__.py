"""Ray, applied once: actors, their bundles, and files on every machine."""
