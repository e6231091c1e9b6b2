"""The interface of chunk codecs."""

from collections.abc import Sequence
from typing import Protocol

from autockpt.executors.image.layout.runs import Run

Frame = memoryview | bytes


class Codec(Protocol):
    """Encodes and decodes one chunk; called from several threads at once, without the GIL held.

    `decode(encode(x), len(x))` is x for every x.  `decode` never produces more than `raw_bytes`
    bytes, also where the frame claims more.  It raises CorruptCheckpointError when it cannot
    produce exactly that many.
    """

    name: str

    def encode(
        self,
        raw: memoryview,
        *,
        runs: Sequence[Run] = (),
        base: memoryview | None = None,
        into: memoryview | None = None,
    ) -> Frame:
        """The frame of a chunk; decoding it needs the same `base`.

        `runs`: the runs of equal elements in the chunk.  `base`: a chunk of the same length that is
        there when this one is read.  `into`: memory where the frame may be built, to be used up
        before the next call with it.  A codec may ignore any of them.
        """

    def decode(self, frame: Frame, raw_bytes: int, *, base: memoryview | None = None) -> Frame:
        """The chunk of a frame.  Raises CorruptCheckpointError."""
