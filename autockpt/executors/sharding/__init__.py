"""Live tensors and stored shards, joined by boxes: any parallelism in, any out.

holdings   what this rank holds of every live tensor
collectors what wrappers know of that: DDP, FSDP1, DeepSpeed, Megatron; `rules` for the rest
pieces     what the shards of a generation hold
loading    pieces -> live tensors, each element exactly once
"""
