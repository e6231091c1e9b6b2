"""When a job starts again, stops, or goes on without a node; and how an announced end is spent."""
