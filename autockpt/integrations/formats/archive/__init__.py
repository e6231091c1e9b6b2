"""Archives: the history of a run in a fraction of its bytes, lossy on demand and never in silence.

An archive is a directory with a file per generation.  Every so many generations one is lossless and
stands alone; the others are residuals against what their predecessor restores.  Nothing here
touches a live checkpoint: archives are made from committed generations and turned back into runs.
"""
