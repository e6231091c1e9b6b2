"""Live tensors and stored shards, joined by boxes: any parallelism in, any out.

* `local_shard`, `local_memory`: this rank's part of every live tensor, and its elements in memory
* `adapters`: the parts as wrappers know them: DDP, FSDP1, DeepSpeed, Megatron
* `rules`: the parts of plain tensors that no wrapper knows
* `optimizers`: optimizer state that is divided otherwise than the parameters
* `fqns`: names that all wrappers and numbers of pipeline stages agree on
* `mesh`, `process_groups`: the place of a rank among the axes and groups of a job
* `ranges`: ranges along one dimension, as boxes
"""
