"""A member of an archive as a run from which `attach` goes on, marked where it is lossy.

The images are the archived generation's, rank by rank: the same tensors cut in the same way, random
states, place in the data.  A lossy one is marked in the skeleton, which every restore reads, and in
the COMMIT, which `ls` and `show` read.
"""

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from autockpt.executors.image.layout.boxes import Box, whole
from autockpt.executors.image.layout.plan import TensorSpec
from autockpt.executors.restore.open_shards import parse_skeleton
from autockpt.integrations.formats.archive.quality import stored_quality
from autockpt.integrations.formats.archive.reading import Archive
from autockpt.integrations.formats.archive.records import Member, RankPart, RankTensor
from autockpt.integrations.formats.convert.committing import GenerationsOf
from autockpt.integrations.formats.convert.destination import new_export
from autockpt.integrations.formats.convert.export import Exported
from autockpt.integrations.formats.convert.image_writer import Record, Ticket, write_image
from autockpt.run_directory import RunDirectory

TARGET = "autockpt"


def restore_member(
    path: str,
    destination: str,
    name: str | None = None,
    *,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:
    """Makes a new run whose only checkpoint is a member of the archive at `path`, the newest one.

    Raises ConfigError, CorruptCheckpointError or StorageError; nothing is left then.
    """
    with (
        contextlib.closing(Archive(path)) as archive,
        new_export(destination, force=force) as made,
    ):
        name = name or archive.newest()
        archive.chain(name)
        member = archive.open(name).member
        run = RunDirectory.create(made)
        directory = GenerationsOf(os.fspath(run.path / "checkpoints"))
        generation = directory.begin(1)
        records = []
        for rank, part in enumerate(member.ranks):
            ticket = Ticket(
                directory=directory.path, run_id=directory.run_id, generation=generation,
                step=member.step, rank=rank, world_size=len(member.ranks),
            )  # fmt: skip
            records.append(_image(archive, member, part, ticket, progress))
        directory.commit(member.step, records)
        directory.close()
        lossy = lossy_note(archive, member)
    return Exported(
        generation=name, step=member.step, target=TARGET, path=destination,
        tensors=sum(len(part.tensors) for part in member.ranks), bytes=member.raw_bytes,
        left_out=(), lossy=lossy,
    )  # fmt: skip


def lossy_of(path: str, name: str) -> str:
    """Return a member's losses, as a restore reports them; "" for a lossless one."""
    with contextlib.closing(Archive(path)) as archive:
        return lossy_note(archive, archive.open(name).member)


def lossy_note(archive: Archive, member: Member) -> str:
    """Return the losses and their known effect, for people; "": none."""
    if not member.coded_lossy:
        return member.lost_before
    found = stored_quality(archive, member.generation)
    effect = (
        str(found) if found else "its effect on this job was not measured (autockpt archive-eval)"
    )
    before = f"; before that {member.lost_before}" if member.lost_before else ""
    return f"archived with {member.codec} as {member.generation}; {effect}{before}"


def _image(
    archive: Archive, member: Member, part: RankPart, ticket: Ticket,
    progress: Callable[[int, int], None],
) -> Record:  # fmt: skip
    skeleton: dict[str, Any] = parse_skeleton(part.skeleton.encode())
    marks = {"lossy": lossy_note(archive, member)} if member.lossy else {}
    tensors = {tensor.name: tensor for tensor in part.tensors}
    done = 0

    def read(name: str) -> Iterable[torch.Tensor]:
        nonlocal done
        tensor = tensors[name]
        for box in _boxes(archive, member, tensor):
            piece = archive.part(member.generation, tensor.key, box)
            yield piece
            done += piece.numel() * piece.element_size()
            progress(done, member.raw_bytes)

    specs = [spec_of_rank(tensor) for tensor in part.tensors]
    owner = ticket.rank if any(tensor.global_shape is None for tensor in part.tensors) else None
    record = write_image(ticket, specs, part.aliases, skeleton | marks, read, owner=owner)
    return record | marks


def _boxes(archive: Archive, member: Member, tensor: RankTensor) -> tuple[Box, ...]:
    """Of the stored tensor: the rank's part of what all ranks share, or all of its own."""
    if tensor.global_shape is not None and tensor.key == tensor.name:
        return tensor.boxes  # none at all where the rank has no share of a small tensor
    form = archive.form(member.generation, tensor.key)
    return (whole(form.shape if form else ()),)


def spec_of_rank(tensor: RankTensor) -> TensorSpec:
    """As the archived image had it."""
    return TensorSpec(
        name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, true_dtype=tensor.true_dtype,
        lazy=True, tensor_class="other", global_shape=tensor.global_shape, boxes=tensor.boxes,
    )  # fmt: skip
