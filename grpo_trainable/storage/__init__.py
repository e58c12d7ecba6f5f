"""Files that outlive a process: atomic writes, digests, checkpoints and object stores."""
