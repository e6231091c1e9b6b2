"""Tests of the storage under checkpoint directories."""
