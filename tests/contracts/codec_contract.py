"""Codec: each chunk is a frame that decodes alone, and no frame makes more than was asked for."""

import contextlib
import itertools
import random
import threading
import tracemalloc
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autockpt.executors.image.codecs.interface import Codec
from autockpt.executors.image.layout.runs import Kind, Run
from autockpt.values.errors import CorruptCheckpointError

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def structured(kind: str, nbytes: int) -> bytes:
    """Chunks as training states have them."""
    numbers = np.random.default_rng(nbytes)
    made = {
        "zeros": lambda: bytes(nbytes),
        "random": lambda: numbers.bytes(nbytes),
        "weights": lambda: (numbers.standard_normal(nbytes) * 0.02).astype("<f4").tobytes(),
        "moments": lambda: (numbers.standard_normal(nbytes) ** 2 * 1e-8).astype("<f4").tobytes(),
        "counters": lambda: np.arange(nbytes, dtype="<i8").tobytes(),
    }[kind]
    return made()[:nbytes]


DESCRIBED = [Kind(width, floating) for width in (1, 2, 4, 8) for floating in (False, True)]
PATTERNS = {  # bytes of elements that break arithmetic on values
    "all ones": b"\xff",
    "fp32 signalling NaN, both signs": b"\x01\x00\x80\x7f\x01\x00\x80\xff",
    "fp32 infinities and zeros": bytes.fromhex("0000807f000080ff0000000000000080"),
    "fp64 NaN payloads": bytes.fromhex("efbeaddeefbef87fefbeaddeefbef8ff"),
    "bf16 subnormals": bytes.fromhex("010001807f007f80"),
    "one value": b"\x3f\x80\x12\x34",
}


KINDS = ("zeros", "random", "weights", "moments", "counters")


class CodecContract:
    """Subclass and give `make`."""

    make: ClassVar[type[Codec]]

    @QUICK
    @given(raw=st.binary(max_size=5000))
    def test_decoding_gives_back_what_was_encoded(self, raw: bytes) -> None:
        """For every chunk, the empty one too."""
        codec = self.make()
        assert codec.decode(codec.encode(memoryview(raw)), len(raw)) == raw

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("nbytes", [1, 4095, 2**16, 2**17, 2**17 + 1, 2**20])
    def test_states_survive_at_block_edges(self, kind: str, nbytes: int) -> None:
        """Sizes around the codec's own blocks; frames may be bytes or a view."""
        codec, raw = self.make(), structured(kind, nbytes)
        frame = bytes(codec.encode(memoryview(raw)))
        assert codec.decode(frame, nbytes) == raw
        assert codec.decode(memoryview(bytearray(frame)), nbytes) == raw

    @pytest.mark.parametrize("kind", DESCRIBED, ids=lambda kind: f"code {kind.code}")
    def test_every_bit_pattern_of_every_element_survives(self, kind: Kind) -> None:
        """Described as what they are: NaN payloads, infinities, zeros of both signs; 1 and more."""
        codec = self.make()
        for pattern, elements in itertools.product(PATTERNS.values(), (1, 3, 70_000)):
            nbytes = elements * kind.width
            raw = (pattern * (nbytes // len(pattern) + 1))[:nbytes]
            frame = bytes(codec.encode(memoryview(raw), runs=[Run(nbytes, kind)]))
            assert codec.decode(frame, nbytes) == raw

    @QUICK
    @given(data=st.data())
    def test_chunks_of_pieces_of_many_tensors_survive(self, data: st.DataObject) -> None:
        """Any runs, in any order, of any groups."""
        kinds = st.sampled_from(DESCRIBED)
        rows = data.draw(st.lists(st.tuples(kinds, st.integers(0, 200), st.integers(0, 2))))
        runs = [Run(count * kind.width, kind, group) for kind, count, group in rows]
        raw = data.draw(st.binary(min_size=(n := sum(run.nbytes for run in runs)), max_size=n))
        codec = self.make()
        assert codec.decode(bytes(codec.encode(memoryview(raw), runs=runs)), n) == raw

    def test_a_frame_built_in_given_memory_is_the_same(self) -> None:
        """Whether it fits there or not."""
        raw, codec = memoryview(structured("weights", 2**16)), self.make()
        runs = [Run(2**16, Kind(4, True))]
        frames = [bytes(codec.encode(raw, runs=runs, into=memoryview(bytearray(size))))
                  for size in (0, 100, 2**17)]  # fmt: skip
        assert set(frames) == {bytes(codec.encode(raw, runs=runs))}

    def test_the_frame_of_a_chunk_is_always_the_same(self) -> None:
        """Retries write the same bytes."""
        raw = memoryview(structured("weights", 2**17))
        assert bytes(self.make().encode(raw)) == bytes(self.make().encode(raw))

    @QUICK
    @given(frame=st.binary(max_size=200), claimed=st.integers(1, 2**20))
    def test_garbage_is_corrupt(self, frame: bytes, claimed: int) -> None:
        """Never another exception, never a wrong length."""
        with contextlib.suppress(CorruptCheckpointError):
            assert len(self.make().decode(frame, claimed)) == claimed

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_cut_or_longer_frame_is_corrupt(self, kind: str) -> None:
        """Whatever is missing, whatever follows."""
        codec, raw = self.make(), structured(kind, 2**16)
        frame = bytes(codec.encode(memoryview(raw)))
        for cut in {0, 1, 4, len(frame) // 2, len(frame) - 1} - {len(frame)}:
            with pytest.raises(CorruptCheckpointError, match="frame"):
                codec.decode(frame[:cut], len(raw))
        for more in (b"\0", frame):
            with pytest.raises(CorruptCheckpointError, match="frame"):
                codec.decode(frame + more, len(raw))

    @pytest.mark.parametrize("claimed", [0, 1, 2**16 - 1, 2**16 + 1, 2**30])
    def test_another_length_than_claimed_is_corrupt(self, claimed: int) -> None:
        """The raw length is authoritative, in both directions."""
        codec = self.make()
        frame = bytes(codec.encode(memoryview(structured("zeros", 2**16))))
        with pytest.raises(CorruptCheckpointError, match="frame"):
            codec.decode(frame, claimed)

    def test_a_bomb_does_not_go_off(self) -> None:
        """64 MiB of zeros claimed to be 4 KiB allocate no megabytes."""
        codec = self.make()
        bomb = codec.encode(memoryview(bytes(64 * 2**20)))
        tracemalloc.start()
        try:
            with pytest.raises(CorruptCheckpointError, match="frame"):
                codec.decode(bomb, 4096)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 2**20

    def test_flipped_bytes_are_refused_or_keep_the_length(self) -> None:
        """Content is the digest's business; length is the codec's."""
        codec, raw = self.make(), structured("moments", 2**14)
        frame = bytearray(codec.encode(memoryview(raw)))
        chance = random.Random(3)
        for _ in range(300):
            place = chance.randrange(len(frame))
            frame[place] ^= 1 << chance.randrange(8)
            with contextlib.suppress(CorruptCheckpointError):
                assert len(codec.decode(bytes(frame), len(raw))) == len(raw)

    def test_one_codec_serves_many_threads(self) -> None:
        """Writers share it."""
        codec = self.make()
        chunks = [structured(kind, 2**16 + i) for i, kind in enumerate(KINDS * 2)]
        wrong: list[int] = []

        def work(i: int) -> None:
            for _ in range(10):
                frame = codec.encode(memoryview(chunks[i]))
                if codec.decode(frame, len(chunks[i])) != chunks[i]:
                    wrong.append(i)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(chunks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
