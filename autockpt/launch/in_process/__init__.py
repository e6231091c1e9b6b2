"""A rank that survives another one's death runs its function again, in the same process."""
