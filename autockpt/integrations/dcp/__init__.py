"""torch.distributed.checkpoint: both directions."""

from autockpt.integrations.dcp.storage_reader import GenerationReader
from autockpt.integrations.dcp.storage_writer import GenerationWriter

__all__ = ["GenerationReader", "GenerationWriter"]
