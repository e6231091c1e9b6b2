"""The checkpoint directory: run, lease, commits, marks and removal."""
