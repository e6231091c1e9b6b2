"""Live tensors and stored shards, joined by boxes: any parallelism in, any out.

holdings   what this rank holds of every live tensor
pieces     what the shards of a generation hold
loading    pieces -> live tensors, each element exactly once
"""
