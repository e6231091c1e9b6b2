"""What a checkpoint costs in time and memory, from a profile."""
