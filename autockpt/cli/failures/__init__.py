"""The command that reads and saves a record of failures."""
