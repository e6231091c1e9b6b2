"""Frames of codecs, of archives and between nodes, and small files beside a run: good inputs."""

import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from autockpt.executors.image.codecs import codec
from autockpt.executors.image.codecs.lossy.coding import decode, encode_lossless, form_of
from autockpt.executors.image.codecs.lossy.entropy import squeezed
from autockpt.executors.image.codecs.lossy.frame import DIGEST_BYTES
from autockpt.executors.image.container import ImageIndex
from autockpt.executors.image.layout.runs import Kind, Run
from autockpt.executors.network.discovery import (
    KeeperAddress,
    open_secret,
    read_address,
    write_address,
)
from autockpt.executors.network.transfer import frames
from autockpt.executors.protocol.messages import Incarnation
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.integrations.formats.archive.member_file import MemberFile
from autockpt.integrations.formats.archive.reading import NAME, Archive
from autockpt.integrations.formats.archive.records import (
    ArchiveFile,
    FramePlace,
    Member,
    RankPart,
    RankTensor,
    StoredBlock,
    StoredGroup,
    StoredTensor,
)
from autockpt.profiling.facts.failure_domains import read_table
from autockpt.session.sharding_rules import rank_rules
from autockpt.values.errors import ConfigError, CorruptCheckpointError, ProtocolError
from autockpt.values.generation import Generation
from autockpt.values.record import to_json
from tests.campaigns.parsers import FAST, SLOW, Parser, through
from tests.unit.executors.image.codecs.lossy.groups import coded, trained_group

G = Generation(term=1, step=1)
RULES = b"""\
copies: [dp]
rules:
  - {match: "*.qkv.weight", sharded: {dim: 0, over: tp}, sub_parameters: [8, 4, 4]}
  - {match: "embed.weight", sharded: {dim: 0, over: tp}, padded_vocabulary: {rows: 50257}}
  - {match: "*.experts.*", expert: {over: dp, total: 64}}
  - {match: "re:.*router[.]bias", averaged: [tp]}
"""
DOMAINS = {
    "domains.csv": b'node,power,rack\n"n[01-02]",p1,a\nn03, p1, b\n',
    "domains.yaml": b"n[01-02]: {power: p1, rack: a}\nn03: {power: p1, rack: b}\n",
    "topology.conf": b"SwitchName=core Switches=leaf[1-2]\nSwitchName=leaf1 Nodes=n[01-02]\n"
    b"SwitchName=leaf2 Nodes=n03\nBlockName=b1 Nodes=n04\n",
}


def frame_parsers(folder: Path) -> list[Parser]:
    """All; files that they read stand in `folder`."""
    return [*_of_codecs(), *_between_nodes(), *_of_archives(folder), *_beside_a_run(folder)]


def _of_codecs() -> Iterator[Parser]:
    values = (np.random.default_rng(0).standard_normal(2**11) * 0.02).astype("<f4")
    moved = values * np.float32(1.001)
    base, raw = (memoryview(np.ascontiguousarray(each)).cast("B") for each in (values, moved))
    planes, runs = codec("planes"), [Run(len(raw), Kind(4, True, True))]
    yield Parser(
        name="planes frame",
        good=tuple(bytes(planes.encode(raw, runs=runs, base=one)) for one in (None, base)),
        read=lambda data: planes.decode(data, len(raw), base=base),
    )
    group, group_base = trained_group((72, 64))
    small, small_base = trained_group((40,))
    for name, data, tensors, against in (
        ("pruned", coded(group, group_base).frames[0], group, group_base),
        ("residual", coded(small, small_base).frames[0], small[:1], small_base),
        ("moments", coded(small, small_base).frames[1], small[1:2], None),
        ("lossless", encode_lossless(small[0]).frames[0], small[:1], None),
    ):
        yield Parser(
            name=f"lossy frame, {name}", good=(data[:-DIGEST_BYTES],), wrap=_digested, batch=SLOW,
            read=partial(decode, forms=[form_of(tensor) for tensor in tensors], base=against),
        )  # fmt: skip


def _digested(body: bytes) -> bytes:
    return body + xxhash.xxh3_128_digest(body)


def _between_nodes() -> Iterator[Parser]:
    refused = (ProtocolError,)
    heads = (
        frames.Header(kind=frames.CHUNK, number=3, length=4096),
        frames.Header(kind=frames.TEXT, length=80),
    )
    yield Parser(
        name="transfer's header", good=tuple(head.pack() for head in heads), errors=refused,
        read=lambda data: frames.read_header(data[:20].ljust(20, b"\0")), batch=FAST,
    )  # fmt: skip
    texts: tuple[frames.Text, ...] = (
        frames.Want(generation=G, rank=1, root="ab", chunks=(frames.Span(start=0, stop=2),)),
        frames.Verified(root="ab"),
        frames.Refused(reason="not now"),
        ImageIndex(
            run_id="r", generation=G, step=1, rank=0, world_size=2, layout_digest="",
            image_bytes=8192, chunk_bytes=4096, digests=("ab", "cd"),
        ),
    )  # fmt: skip
    yield Parser(
        name="transfer's text", errors=refused, batch=FAST, read=frames.read_text,
        good=tuple(frames.pack_text(text)[frames.HEADER_BYTES :] for text in texts),
    )  # fmt: skip


def _of_archives(folder: Path) -> Iterator[Parser]:
    home = folder / "archive"
    home.mkdir()
    about = ArchiveFile(run_id="r", codec="excp", full_every=4)
    yield Parser(
        name="ARCHIVE", good=(to_json(about).encode(),), errors=(ConfigError,),
        read=through(home / NAME, lambda: Archive(str(home)).close()),
    )  # fmt: skip
    place = FramePlace(offset=0, length=100)
    member = Member(
        generation=G.name, step=7, codec="excp", base="ckpt-t0001-step-00000000", base_digest="ab",
        raw_bytes=4096, created_s=1.5,
        groups=(
            StoredGroup(
                tensors=(StoredTensor(key="w", dtype="float32", shape=(8, 4)),),
                blocks=(StoredBlock(start=0, stop=8, frames=(place,)),), lossy=True,
            ),
        ),
        ranks=(
            RankPart(
                aliases={"tied": "w"}, skeleton="{}",
                tensors=(
                    RankTensor(
                        name="w", key="w", dtype="F32", shape=(8, 4), true_dtype="float32",
                        global_shape=None, boxes=(),
                    ),
                ),
            ),
        ),
    )  # fmt: skip
    path = folder / "member.ackpt"
    yield Parser(
        name="member of an archive", good=(to_json(member).encode(),), wrap=_member,
        read=through(path, lambda: MemberFile(str(path)).close()),
    )  # fmt: skip


def _member(index: bytes) -> bytes:
    stored = squeezed(index)
    foot = struct.pack(
        "<QQ16s8s", len(stored), len(index), xxhash.xxh3_128_digest(stored), b"ACARCH1\n"
    )
    return bytes(100) + stored + foot


def _beside_a_run(folder: Path) -> Iterator[Parser]:
    directory = CheckpointDirectory(str(folder / "named"))
    directory.open()
    run = Path(directory.path, "RUN")
    yield Parser(
        name="RUN", good=(run.read_bytes(),), read=through(run, directory.open),
        errors=(ConfigError, CorruptCheckpointError),
    )  # fmt: skip
    address = KeeperAddress(
        run_id="r", node=3, host="10.0.0.1", port=4000, nonce="n",
        incarnation=Incarnation(launch_id="a", restart_round=2),
    )  # fmt: skip
    open_secret(directory.path)
    write_address(directory.path, address)
    card = Path(directory.path, "control", "node-003.json")
    yield Parser(
        name="keeper's address", good=(card.read_bytes(),), errors=(),
        read=through(card, lambda: read_address(directory.path, 3)),
    )  # fmt: skip
    rules, axes = folder / "rules.yaml", {"dp": 2, "tp": 4}
    yield Parser(
        name="sharding rules", good=(RULES,), errors=(ConfigError,), batch=SLOW,
        read=through(rules, lambda: rank_rules(str(rules), axes, rank=0, world_size=8)),
    )  # fmt: skip
    for name, good in DOMAINS.items():
        path = folder / name
        yield Parser(
            name=f"failure domains, {name}", good=(good,), errors=(ConfigError,), batch=SLOW,
            read=through(path, partial(read_table, str(path))),
        )  # fmt: skip
