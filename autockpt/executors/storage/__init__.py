"""Checkpoint directories: files, catalogue, guard, lineage, maintenance and remote copies."""
