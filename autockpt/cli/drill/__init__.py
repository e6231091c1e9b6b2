"""`autockpt drill`: faults on a user's own job, the promise beside the outcome."""
