"""The auto-tuner in a run: its thread, the records it keeps, changes of plan."""
