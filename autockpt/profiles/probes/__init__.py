"""Probes: the only code that measures.  They return samples and never decide.

The caller hands in the work to time (a copy, a write, a codec), so that probes measure the code
that will run.  A probe is bounded in time and space, cleans up behind itself, and says in a
sentence what it could not measure.
"""
