"""Codecs that lose something, for archives only: ExCP's pruned residuals and 8-bit moments.

Unlike the chunk codecs of `codecs/` they see tensors: a parameter with its two moments is one
group.  Nothing of a live checkpoint passes here.  `frame` is the container, `pruned` and `blocks`
are the two ways to lose, `coding` chooses for a group and keeps the loop closed.
"""
