"""WHAT DID WE MEASURE?  Estimators turn samples into a Profile; only `probes/` measures.

    probes/*  --samples-->  estimators  --measures-->  assemble  -->  values.Profile

Everything here but `probes/` is pure: no torch, no files, no clocks.  The caller in
`autockpt/profiling/` supplies the bytes and their mover, so the probes time the code that will run.
"""
