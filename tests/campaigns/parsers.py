"""Everything of autockpt that reads bytes it did not write: good inputs, and the call.

A parser may return, or raise the errors it documents; nothing else.
"""

import hashlib
import io
import json
import os
import re
import struct
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from autockpt.cli.shared.failure_import import read_failures
from autockpt.executors.image.codecs import codec
from autockpt.executors.image.container import (
    find_header,
    header_bytes,
    read_header,
    read_index,
    read_trailer,
)
from autockpt.executors.image.layout.plan import EXTRA
from autockpt.executors.keeper import wire
from autockpt.executors.keeper.event_recorder import EventRecorder
from autockpt.executors.network.handshake import Channel, Identity, frame
from autockpt.executors.protocol import messages as p
from autockpt.executors.restore.open_shards import parse_skeleton
from autockpt.executors.state import state_tree
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.directory.records import read_commit
from autockpt.executors.storage.lineage import decision_text, read_decision
from autockpt.integrations.dcp import directory as dcp_directory
from autockpt.integrations.formats.files import safetensors_file, torch_file
from autockpt.policies.decide import decide
from autockpt.policies.policy_file import init_text, parse_policy, plan_from_yaml, plan_to_yaml
from autockpt.run_directory import RunDirectory
from autockpt.values import telemetry as t
from autockpt.values.errors import (
    AutockptError,
    ConfigError,
    CorruptCheckpointError,
    ProtocolError,
)
from autockpt.values.failure import FailureRecord
from autockpt.values.generation import Generation
from autockpt.values.goal import Goal
from autockpt.values.profile import Profile
from autockpt.values.record import from_json, to_json
from tests.campaigns.job import DURABLE, SHAPES, Scene, image_of
from tests.support.profiles import example_profile
from tests.unit.executors.checkpoints import commit_state
from tests.unit.executors.states import Holder, trained

G = Generation(term=1, step=1)
MAX_IMAGE = 2**20
FAST, ORDINARY, SLOW = 600, 20, 2
"""Batches of parsers that take some 20 us, some 100 us, and milliseconds for an input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parser:
    """One of them."""

    name: str
    good: tuple[bytes, ...]
    """Inputs that it takes."""
    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...] = (CorruptCheckpointError,)
    """What it may raise."""
    wrap: Callable[[bytes], bytes] = lambda text: text
    """Lengths and digests around a text that was changed: anybody can compute them."""
    batch: int = ORDINARY
    """Inputs at a time: more where one takes less."""


def parsers(folder: Path) -> list[Parser]:
    """All; files that they read stand in `folder`."""
    return [
        *_stored(folder),
        *_on_wires(),
        *_records(folder),
        *_of_others(folder),
    ]


# --- what checkpoints are made of ---------------------------------------------------------------


def _stored(folder: Path) -> Iterator[Parser]:
    job = Scene(folder, SHAPES[1]).fresh()
    home = Path(job.directory.generation_path(DURABLE))
    index = (home / "idx-00000-a1.json").read_bytes()
    yield Parser(name="index", good=(index,), read=lambda data: read_index(data, where="x"))
    yield Parser(name="trailer", good=(index,), read=_read_trailer, errors=(), wrap=_trailer)
    commit = folder / "COMMIT"
    yield Parser(
        name="COMMIT", good=((home / "COMMIT").read_bytes(),),
        read=through(commit, lambda: read_commit(str(commit))), wrap=_sealed,
    )  # fmt: skip
    yield Parser(
        name="decision", good=(decision_text(2, 1, G, "newest"), decision_text(2, 2, None, "new")),
        read=lambda data: read_decision(data, term=2, where="x"), wrap=_sealed_decision,
    )  # fmt: skip
    image, skeleton = _image(folder)
    yield Parser(name="image header", good=(image,), read=_read_header, wrap=_prefixed)
    yield Parser(name="skeleton", good=(skeleton,), read=_read_skeleton)
    raw = image_of(DURABLE, 0, SHAPES[1])
    yield Parser(
        name="zstd frame", good=(bytes(codec("zstd").encode(memoryview(raw))),),
        read=lambda data: codec("zstd").decode(data, len(raw)), batch=FAST,
    )  # fmt: skip
    yield _claims(folder)


def _claims(folder: Path) -> Parser:
    directory = CheckpointDirectory(str(folder / "claimed"))
    directory.claim(directory.open(), "launch", 0, force=False)
    path = folder / "claimed" / "terms" / "t-000001"
    return Parser(
        name="term", good=(path.read_bytes(),), read=through(path, directory.highest_term),
        errors=(),
    )  # fmt: skip


def _trailer(index: bytes) -> bytes:
    head = len(index).to_bytes(8, "little") + hashlib.sha256(index).digest()
    return b"ACKPTTR1" + head + index


def _sealed(commit: bytes) -> bytes:
    """With the digest of what it says now, where it still has one."""
    text = re.sub(rb'"digest":"[0-9a-f]*"\}$', b'"digest":""}', commit)
    digest = hashlib.sha256(text).hexdigest().encode()
    return re.sub(rb'"digest":""\}$', b'"digest":"' + digest + b'"}', text)


def _sealed_decision(decision: bytes) -> bytes:
    text = re.sub(rb', ?"digest": ?"[0-9a-f]*"\}$', b"}", decision)
    try:
        text = json.dumps(json.loads(text)).encode()
    except (ValueError, RecursionError):
        return decision
    digest = hashlib.sha256(text).hexdigest().encode()
    return text[:-1] + b', "digest": "' + digest + b'"}'


def _prefixed(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def _framed(text: bytes) -> bytes:
    return struct.pack("!I", len(text)) + text


def _read_trailer(data: bytes) -> object:
    return read_trailer(memoryview(data.ljust(4096, b"\0")))


def _image(folder: Path) -> tuple[bytes, bytes]:
    """(header, skeleton) of a real state."""
    from autockpt.executors.state.live_state import LiveState

    model, optimizer = trained()
    other = Holder({"best": torch.randn(3), "names": ("a", {1: 2.5}), "big": 2**70, "b": b"x"})
    state = LiveState.of(model=model, optimizer=optimizer, other=other)
    directory = CheckpointDirectory(str(folder / "state"))
    run_id = directory.open()
    directory.claim(run_id, "launch", 0, force=False)
    home = Path(commit_state(directory, run_id, G, state))
    data = (home / "shard-00000-a1.safetensors").read_bytes()
    size = header_bytes(memoryview(data), len(data))
    place = read_header(data[:size], len(data)).tensors[EXTRA]
    return data[8:size], data[place.start : place.stop].rstrip()


def _read_header(data: bytes) -> object:
    view, rest = memoryview(data.ljust(16, b"\0")), memoryview(bytes(4096))
    return find_header(lambda n: view[4096 * n : 4096 * (n + 1)] or rest, MAX_IMAGE)


def _read_skeleton(data: bytes) -> object:
    skeleton = parse_skeleton(data)
    names = state_tree.tensor_names([*skeleton.values()])
    tensors = {name: torch.zeros(2) for name in names if isinstance(name, str)}
    return state_tree.decode(skeleton, tensors)


# --- what travels -------------------------------------------------------------------------------


def _on_wires() -> Iterator[Parser]:
    messages = [
        wire.SlotsWanted(rank=0, image_bytes=4096, chunk_bytes=4096, slots=2),
        wire.SnapshotCopied(
            rank=0, generation=G, replicas=(p.ReplicaProof(members=2, among="cd", digest="ab"),)
        ),
        wire.Status(
            pid=1, term=1, trainers=(0,), memory_committed="", durable="", draining=False,
            slots_bytes=0,
        ),
    ]  # fmt: skip
    yield Parser(
        name="trainer's frame", good=tuple(_frame_text(message) for message in messages),
        read=wire.decode, errors=(ProtocolError,), batch=FAST,
    )  # fmt: skip
    me = Identity(run_id="r", node=0, incarnation=p.Incarnation(launch_id="l", restart_round=0))
    held = p.HeldShard(rank=0, slot=0, generation=G, step=1, world_size=1, root="ab")
    sealed = frame(p.RankSealed(shard=held))

    def called(data: bytes) -> object:
        channel = Channel(b"k" * 32, me, to_node=None)
        channel._nonces = asked._nonces  # so that the good proof is one
        return channel.feed(data)

    def caller(data: bytes) -> object:
        return Channel(b"k" * 32, me, to_node=1).feed(data)

    def known(data: bytes) -> object:
        channel = Channel(b"k" * 32, me, to_node=None)
        channel.peer = me
        return channel.feed(data)

    asked = Channel(b"k" * 32, me, to_node=None)
    challenge = asked.outbox[0]
    answering = Channel(b"k" * 32, replace(me, node=1), to_node=0)
    answering.feed(challenge)
    refused = (ProtocolError,)
    for name, good, read in (
        ("introduction", answering.outbox[0], called),
        ("challenge", challenge, caller),
        ("keeper's frame", sealed, known),
    ):
        yield Parser(
            name=name, good=(good[4:],), read=read, errors=refused, wrap=_framed, batch=FAST
        )


def _frame_text(message: Any) -> bytes:
    body = {"type": type(message).__name__, "body": json.loads(to_json(message))}
    return json.dumps(body, separators=(",", ":")).encode()


# --- what a run keeps ---------------------------------------------------------------------------


def _records(folder: Path) -> Iterator[Parser]:
    profile = to_json(example_profile()).encode()
    yield Parser(
        name="profile", batch=SLOW, good=(profile,), read=lambda data: from_json(Profile, data),
        errors=(ConfigError,),
    )  # fmt: skip
    policy = init_text().encode()
    small = b"version: 1\nextends: builtin:auto\nlimits:\n  stall: 200 ms\nkeep: {every: 6 h}\n"
    yield Parser(
        name="policy", batch=SLOW, good=(policy, small), errors=(ConfigError,),
        read=lambda data: parse_policy(data.decode("utf-8", "replace")),
    )  # fmt: skip
    plan = plan_to_yaml(decide(example_profile(), Goal())).encode()
    yield Parser(
        name="plan", batch=SLOW, good=(plan,), errors=(ConfigError,),
        read=lambda data: plan_from_yaml(data.decode("utf-8", "replace")),
    )  # fmt: skip
    run = RunDirectory.create(folder / "run")
    events = run.telemetry / "rank-00000.jsonl"
    yield Parser(
        name="telemetry", good=(_telemetry(),), read=through(events, run.events),
        errors=(ConfigError,),
    )  # fmt: skip
    yield Parser(
        name="telemetry by the next keeper", good=(_telemetry(),), errors=(),
        read=through(events, lambda: EventRecorder(str(run.path), 7).close()),
    )  # fmt: skip
    log = folder / "failures.jsonl"
    yield Parser(
        name="failure log", good=(_failure_log(),), errors=(ConfigError,),
        read=through(log, lambda: read_failures(str(log))),
    )  # fmt: skip


def _telemetry() -> bytes:
    events: list[t.Event] = [
        t.RunStarted(
            at_s=1.0, rank=0, wall="2026-01-01T00:00:00Z", run_id="r", term=1, world_size=1,
            pid=1, plan_id="p", plan_version=1, state_bytes=1, restart_count=0,
        ),
        t.IterationsTimed(
            at_s=2.0, rank=0, step=8, count=8, total_s=1.0, checkpoint_s=0.0, quiet_s=0.1,
            busy_s=0.1,
        ),
        t.SnapshotBegan(at_s=3.0, rank=0, generation="step 8 (term 1)", step=8, tiers="memory"),
    ]  # fmt: skip
    return "".join(json.dumps(t.event_data(event)) + "\n" for event in events).encode()


def _failure_log() -> bytes:
    record = FailureRecord(
        wall="2026-01-01T00:00:00Z", kind="process", what="trainer", node=0, step=3,
        exposure_s=10.0, restart_s=1.0, restore_s=0.5, source="memory", lost_steps=1, lost_s=0.1,
    )  # fmt: skip
    return (to_json(record) + "\n").encode() * 2


# --- what others wrote --------------------------------------------------------------------------


def _of_others(folder: Path) -> Iterator[Parser]:
    tensors = {"a": torch.ones(3), "b": torch.zeros(2, 2, dtype=torch.bfloat16)}
    single = folder / "model.safetensors"
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
        "b": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [12, 20]},
    }
    text = json.dumps(header).encode()
    yield Parser(
        name="safetensors", good=(text,), wrap=lambda text: _prefixed(text) + bytes(20),
        read=through(single, lambda: _all_of(safetensors_file.read_file(str(single))[0])),
    )  # fmt: skip
    directory = folder / "dcp"
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"model": tensors, "step": 3}, checkpoint_id=str(directory), no_dist=True)
    metadata = directory / ".metadata"
    yield Parser(
        name="DCP metadata", good=(metadata.read_bytes(),),
        read=through(metadata, lambda: dcp_directory.read_directory(str(directory))),
    )  # fmt: skip
    saved = io.BytesIO()
    torch.save({"model": tensors, "epoch": 3}, saved)
    pickled = folder / "model.pt"
    yield Parser(
        name="torch.save", good=(saved.getvalue(),), errors=(AutockptError,),
        read=through(pickled, lambda: torch_file.read_file(str(pickled))),
    )  # fmt: skip
    table = b"JobID|State|ExitCode|Start|End|ElapsedRaw|NNodes|NodeList|FailedNode\n" + (
        b"1|NODE_FAIL|0:0|2026-01-01T00:00:00|2026-01-02T00:00:00|86400|8|n[1-8]|n3\n" * 2
    )
    xids = b"Jan  1 00:00:00 n1 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off\n"
    record = folder / "record.txt"
    for name, good, observed_s in (
        ("Slurm accounting", table, None),
        ("kernel log", xids * 2, 1e6),
        ("outages", b"node,start_h,end_h\n0,1.5,2\n1,3,4\n", 1e6),
    ):
        yield Parser(
            name=name, good=(good,), errors=(ConfigError,),
            read=through(
                record, partial(read_failures, str(record), nodes=8, observed_s=observed_s)
            ),
        )  # fmt: skip


def _all_of(tensors: dict[str, Any]) -> object:
    return [tensor.read() for tensor in tensors.values() if tensor.nbytes < MAX_IMAGE]


def through(path: Path, read: Callable[[], object]) -> Callable[[bytes], object]:
    """A parser of files as a parser of bytes."""

    def call(data: bytes) -> object:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(fd, data)
        os.close(fd)
        return read()

    return call
