"""Analysis of a run's events: accounting, restarts, promises, replication, risk."""
