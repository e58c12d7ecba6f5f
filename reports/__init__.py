"""Read an experiment from disk, compare its arms, and write the table, the plots and the page."""

STORAGE = "~/ray_results"  # default of --storage, the directory of all experiments
EXPERIMENT_FILE = "experiment.json"  # description of an experiment, in its directory
EXTENSIONS = "extensions"  # subdirectory with a directory for each use of `--extend`: 1, 2, …
