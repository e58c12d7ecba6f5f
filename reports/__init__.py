"""Read an experiment from disk, compare its arms, and write the table, the plots and the page."""

EXPERIMENT_FILE = "experiment.json"  # describes the experiment in whose directory it is
