"""Archive commands: add to one, bring a member back, list, show, verify."""

import contextlib
import os
import re
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from autockpt.console import Console
from autockpt.launch.elastic.signals import told_to_end
from autockpt.values.policy_keys.paths import is_store_url

if TYPE_CHECKING:
    from autockpt.integrations.formats.archive.reading import Archive
    from autockpt.integrations.formats.archive.records import Codec, Member
    from autockpt.integrations.formats.archive.writing import Archived


FOLLOW_EVERY_S = 5.0
"""Between two looks at a run that is followed: a listing of its directory."""
AGAIN_S = 30.0
"""After storage that failed."""


def is_archive(path: str) -> bool:
    """Whether a path is one; imports nothing."""
    return os.path.isfile(os.path.join(path, "ARCHIVE"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The request to archive, checked."""

    source: str
    destination: str
    generation: str | None
    """None: every good one that is newer than the archive's newest."""
    codec: str
    full_every: int | None
    follow: bool
    """Continue with new checkpoints of the run until SIGTERM; then copy a last time."""


def add(console: Console, request: Request) -> int:
    """Adds what is to be added; exit code."""
    from autockpt.values.errors import (
        AutockptError,
        ConfigError,
        CorruptCheckpointError,
        NoCheckpointError,
    )

    ended = told_to_end() if request.follow else threading.Event()
    archiver = _Archiver(console, request)
    while True:
        last, pause_s = ended.is_set() or not request.follow, FOLLOW_EVERY_S
        try:
            archiver.look()
        except NoCheckpointError:
            if not request.follow:
                raise
        except (ConfigError, CorruptCheckpointError):
            raise  # it will not become better
        except AutockptError as error:
            if last:
                raise
            archiver.failed(error)
            pause_s = AGAIN_S
        if last:
            break
        ended.wait(pause_s)
    return archiver.end()


class _Archiver:
    """Knows what was added, and what never will be."""

    def __init__(self, console: Console, request: Request) -> None:
        self._console, self._request = console, request
        self._done: list[Archived] = []
        self._passed: set[str] = set()
        self._damaged = False
        self._trouble = ""

    def look(self) -> None:
        """Adds what the run has and the archive lacks.

        Who follows a run passes over what was deleted while it was read, or is damaged.
        """
        from autockpt.integrations.formats.archive.records import ArchiveFile
        from autockpt.integrations.formats.archive.writing import FULL_EVERY, open_archive
        from autockpt.integrations.formats.convert.image_reader import commit_of
        from autockpt.integrations.places import find_place, good_generations
        from autockpt.run_directory import RunDirectory
        from autockpt.values.errors import NoCheckpointError
        from autockpt.values.generation import Generation

        request, run = self._request, RunDirectory(self._request.source)
        path = run.checkpoints() if request.follow and run.exists else ""
        if path and not is_store_url(path) and not os.path.isdir(path):
            raise NoCheckpointError(f"{request.source}: has no checkpoints yet")
        place = find_place(request.source)
        chosen = request.generation or place.generation
        names = [chosen] if chosen else good_generations(place.directory)
        newest = os.path.join(place.directory, names[-1])
        if request.follow and not _is_committed(newest):
            return  # deleted since it was listed
        about = ArchiveFile(
            run_id=commit_of(newest).run_id, codec=cast("Codec", request.codec),
            full_every=request.full_every or FULL_EVERY,
        )  # fmt: skip
        with contextlib.closing(open_archive(request.destination, about)) as archive:
            there = archive.names()
            last = Generation.from_name(there[-1]) if there else None
            newer = [n for n in names if chosen or last is None or Generation.from_name(n) > last]
            for name in (name for name in newer if name not in self._passed):
                if not chosen and (found := _sickness(place.directory, name)):
                    self._passed.add(name)
                    self._console.say(
                        f"{name}: not archived: {found}; name it to archive it all the same"
                    )
                    continue
                self._add(archive, place.directory, name)
        self._trouble = ""

    def _add(self, archive: "Archive", directory: str, name: str) -> None:
        from autockpt.integrations.formats.archive.writing import add_generation
        from autockpt.values.errors import AutockptError

        folder = os.path.join(directory, name)
        try:
            with self._console.progress(f"archive {name}") as progress:
                done = add_generation(archive, folder, progress=progress.at)
        except AutockptError as error:
            if not self._request.follow or not self._passes_over(directory, name, error):
                raise
            return
        self._done.append(done)
        self._console.result(_added(done))

    def _passes_over(self, directory: str, name: str, error: Exception) -> bool:
        """Whether it is this generation that failed, and will fail again."""
        from autockpt.executors.storage.catalogue import verify_generation
        from autockpt.values.errors import CorruptCheckpointError

        if not _is_committed(os.path.join(directory, name)):
            self._console.say(f"{name}: was deleted before it was archived ({error})")
        elif (
            isinstance(error, CorruptCheckpointError) and verify_generation(directory, name).damaged
        ):
            self._damaged = True
            self._console.warn(f"{name}: not archived, it is damaged: {error}")
        else:
            return False
        self._passed.add(name)
        return True

    def failed(self, error: Exception) -> None:
        """Said once for each reason, however often it is tried again."""
        reason = re.sub(r"[\d.]+", "", str(error))
        if reason != self._trouble:
            self._trouble = reason
            self._console.warn(f"not archived: {error}; trying again every {AGAIN_S:.0f} s")

    def end(self) -> int:
        """Says what is there; exit code."""
        from autockpt.values.errors import CorruptCheckpointError
        from autockpt.values.record import to_data

        destination, source = self._request.destination, self._request.source
        added = to_data(tuple(self._done))
        self._console.object("convert", {"archive": destination, "added": added})
        if not is_archive(destination):
            self._console.say(f"{source}: had nothing to archive")
            return 0
        if not self._done and not self._damaged:
            self._console.say(f"{destination}: holds everything of {source} already")
        elif any(one.lossy for one in self._done):
            self._console.warn(
                f"{destination} is LOSSY: restored values are close to the trained ones, and "
                f"not equal; `autockpt archive-eval` measures the difference on your job"
            )
        self._console.next(["autockpt", "ls", destination])
        return CorruptCheckpointError.exit_code if self._damaged else 0


def _is_committed(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, "COMMIT"))


def _sickness(directory: str, name: str) -> str:
    """Return the doubt about the numbers of a good checkpoint; "" without any.

    A checkpoint that its keeper has not read back yet, or could not mark, is read here.  A seal may
    have looked at a part of it only.
    """
    from autockpt.executors.storage.catalogue import verify_generation

    folder = os.path.join(directory, name)
    if not os.path.exists(os.path.join(folder, "VERIFIED")):
        return verify_generation(directory, name).sick
    # The mark SUSPECT is older than VERIFIED, and may be newer than the listing.
    return "it is suspect" if os.path.exists(os.path.join(folder, "SUSPECT")) else ""


def _added(one: "Archived") -> str:
    from autockpt.values.units import format_bytes

    kind = "lossless"
    if one.lossy and one.codec == "none":
        kind = "LOSSY before it was archived"
    elif one.lossy:
        kind = f"LOSSY ({one.codec}), against {one.base}"
    return (
        f"{one.generation} (step {one.step}): {format_bytes(one.raw_bytes)} -> "
        f"{format_bytes(one.stored_bytes)}, {one.ratio:.1f}x, {kind}, {one.seconds:.1f} s"
    )


def bring_back(
    console: Console, source: str, destination: str, target: str, generation: str | None, *,
    force: bool,
) -> int:  # fmt: skip
    """A member as a run; exit code."""
    from autockpt.integrations.formats.archive.restoring import TARGET, lossy_of, restore_member
    from autockpt.values.errors import ConfigError
    from autockpt.values.record import to_data
    from autockpt.values.units import format_bytes

    if target != TARGET:
        raise ConfigError(
            f"{source}: is an archive; make a run of it first: autockpt convert {source} RUN "
            f"--to autockpt, then autockpt convert RUN {destination} --to {target}"
        )
    with console.progress("convert") as progress:
        done = restore_member(source, destination, generation, force=force, progress=progress.at)
    lossy = lossy_of(source, done.generation)
    console.object("convert", {**to_data(done), "lossy": lossy})
    console.result(
        f"{done.generation} (step {done.step}) -> {destination}: {done.tensors} tensors, "
        f"{format_bytes(done.bytes)}"
    )
    if lossy:
        console.warn(f"LOSSY: {lossy}; a training that goes on from it is another one")
    console.next(["autockpt", "run", "--run-dir", destination, "SCRIPT"])
    return 0


def ls(console: Console, path: str) -> None:
    """The members, oldest first."""
    from autockpt.integrations.formats.archive.reading import Archive
    from autockpt.values.units import format_bytes

    with contextlib.closing(Archive(path)) as archive:
        rows = [_row_or_damage(archive, name) for name in archive.names()]
        console.object("ls", {"archive": path, "codec": archive.about.codec, "generations": rows})
    if not rows:
        console.say(f"{path}: an archive without generations")
        return
    console.table(
        ("checkpoint", "step", "size", "ratio", "codec", "needs", "note"),
        (
            (
                row["generation"],
                "-" if row["step"] is None else str(row["step"]),
                "-" if row["bytes"] is None else format_bytes(row["bytes"]),
                "-" if row["ratio"] is None else f"{row['ratio']:.1f}x",
                row["codec"] or "-", row["base"] or "-", row["note"],
            )
            for row in rows
        ),
    )  # fmt: skip
    console.next(["autockpt", "verify", path])


def _row_or_damage(archive: "Archive", name: str) -> dict[str, Any]:
    """A member that cannot be read hides no other one."""
    from autockpt.values.errors import AutockptError

    try:
        return _row(archive, name)
    except (AutockptError, OSError) as error:
        unknown = ("step", "bytes", "ratio", "codec", "base", "lossy", "ranks", "created_s")
        return {**dict.fromkeys(unknown), "generation": name, "note": f"damaged: {error}"}


def _row(archive: "Archive", name: str) -> dict[str, Any]:
    from autockpt.integrations.formats.archive.quality import stored_quality

    file = archive.open(name)
    member: Member = file.member
    found = stored_quality(archive, name)
    note = "LOSSY" if member.lossy else ""
    return {
        "generation": name, "step": member.step, "bytes": file.bytes,
        "ratio": member.raw_bytes / file.bytes, "codec": member.codec, "base": member.base,
        "lossy": member.lossy, "ranks": len(member.ranks), "created_s": member.created_s,
        "note": f"{note}: {found}" if found else note,
    }  # fmt: skip


def show(console: Console, path: str, generation: str | None, *, tensors: bool) -> None:
    """One member."""
    from autockpt.integrations.formats.archive.reading import Archive
    from autockpt.values.record import to_data

    with contextlib.closing(Archive(path)) as archive:
        name = generation or archive.newest()
        row = _row(archive, name)
        groups = archive.open(name).member.groups
        console.object("show", {**row, "archive": path, "groups": to_data(groups)})
    row["created"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.pop("created_s")))
    row["lossy"] = row.pop("note") or "no: every tensor comes back to the bit"
    for key, value in row.items():
        console.result(f"{key:<13} {value}")
    if tensors:
        console.result("")
        console.table(
            ("tensor", "dtype", "shape", "bytes stored with its group", "lossy"),
            (
                (
                    tensor.key, tensor.dtype, str(list(tensor.shape)),
                    str(sum(f.length for block in group.blocks for f in block.frames)),
                    "LOSSY" if group.lossy else "",
                )
                for group in groups
                for tensor in group.tensors
            ),
        )  # fmt: skip


def verify(console: Console, path: str, generation: str | None, *, every: bool) -> int:
    """Decodes members and compares what comes out with its digests; exit code."""
    from autockpt.integrations.formats.archive.reading import Archive
    from autockpt.values.errors import CorruptCheckpointError
    from autockpt.values.units import format_bytes

    problems: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        archive = stack.enter_context(contextlib.closing(Archive(path)))
        names = archive.names() if every else [generation or archive.newest()]
        progress = stack.enter_context(console.progress("verify", unit="checkpoints"))
        for number, name in enumerate(names, start=1):
            try:
                count = archive.verify(name)
                console.result(f"ok       {name}: {format_bytes(count)} decoded")
            except CorruptCheckpointError as error:
                problems[name] = str(error)
                console.result(f"DAMAGED  {name}: {error}")
            progress.at(number, len(names))
    console.object("verify", {"archive": path, "ok": not problems, "problems": problems})
    return CorruptCheckpointError.exit_code if problems else 0
