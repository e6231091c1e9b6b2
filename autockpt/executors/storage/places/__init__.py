"""Where a checkpoint directory stands: a file system, or an object store under a URL."""
