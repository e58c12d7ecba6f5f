"""Code that uses Ray: actors, their bundles, and files on every machine."""
