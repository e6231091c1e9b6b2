"""Readers of failures that others have recorded: text in, a FailureHistory out, no files.

One module for each format, with `recognises(text)` and `read(text, where=...)`; the command line's
`failure_import` has the table of formats and opens the files.
"""
