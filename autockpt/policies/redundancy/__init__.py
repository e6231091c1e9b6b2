"""Chooses replicas or parity: schemes, survival, costs of the link."""
