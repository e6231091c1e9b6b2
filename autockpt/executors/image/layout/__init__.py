"""Where every byte stands: pure arithmetic, equal on all ranks, readable by any reader.

* `plan`: the image of one rank: a header, then every tensor at its place
* `boxes`: parts of global tensors
* `dedup`: which of the ranks that hold the same bytes stores which
* `runs`: equal elements of a chunk, for codecs
* `room`: the slots or window that a rank gets
"""
