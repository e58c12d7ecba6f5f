"""Files that outlive a process: atomic writes, digests, checkpoints, object stores."""
