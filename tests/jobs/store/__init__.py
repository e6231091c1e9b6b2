"""Jobs whose checkpoints go to an object store."""
