"""What a run's events mean: accounting, restarts, promises, replication, risk."""
