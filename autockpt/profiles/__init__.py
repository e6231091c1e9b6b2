"""WHAT DID WE MEASURE?  Estimators turn samples into a Profile; only `probes/` measures.

    probes/*  --samples-->  estimators  --measures-->  assemble  -->  values.Profile

Everything here but `probes/` is pure: no torch, no files, no clocks.  Which bytes move and who
moves them comes from outside (`autockpt/profiling/`), so that what is timed is what will run.
"""
