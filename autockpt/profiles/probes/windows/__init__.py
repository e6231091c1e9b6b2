"""Probes that watch an iteration: its marks, its pipeline stages and its traffic."""
