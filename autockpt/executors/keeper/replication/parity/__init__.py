"""Parity over the images of a set of ranks: lose up to k members, get their images back to the bit.

A set of N members, each on another failure domain.  Stripe s (of N) has its parity on the members
s, s+1, ..., s+k-1 (mod N).  The other N-k members have one segment of their image in it.  So every
member has data in N-k stripes and parity in k, and none holds parity of its own data.  A member
stores k/(N-k) of the largest image beside its own.  For k = 1 this is 1/(N-1), plain XOR, as in
RAID-5 and REFT's RAIM5.  Source of the rotation: redset of LLNL, the parity code of SCR.

Row j of a stripe is the sum of its segments, each times a constant of GF(16).  The constants are a
Cauchy matrix whose first row is all ones.  Multiplying by a constant is a 4 x 4 matrix of bits over
four packets of a block.  So it needs only XORs of long runs of bytes (Blömer et al. 1995).  numpy
does these without the interpreter's lock.

Everything is linear: chunks are added as they arrive, in any order, to a parity or to an image that
is being rebuilt.
"""
