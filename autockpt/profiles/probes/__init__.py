"""Probes: the only code that measures.  They return samples and never decide.

What they time is handed in (a copy, a write, a codec), so that what is measured is what will run.
A probe is bounded in time and space, cleans up behind itself, and says in a sentence what it could
not measure.
"""
