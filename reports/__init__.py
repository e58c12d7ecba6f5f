"""Read an experiment from disk, compare its arms, and write the table, the plots and the page."""

EXPERIMENT_FILE = "experiment.json"  # describes an experiment at its start, in its directory
