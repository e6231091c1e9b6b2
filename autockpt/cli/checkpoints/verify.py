"""`autockpt verify PATH [GENERATION]`: read checkpoints back and compare every digest."""

from typing import TYPE_CHECKING

import click

from autockpt.cli.checkpoints import archive
from autockpt.cli.shared.options import Command, common
from autockpt.console import Console

if TYPE_CHECKING:
    from autockpt.executors.storage.catalogue import VerifyResult
    from autockpt.integrations.places import Place

EXAMPLES = """
autockpt verify runs/train-20260101-120000                # the newest checkpoint
autockpt verify runs/train-20260101-120000 --all
autockpt verify runs/train-20260101-120000 --quarantine   # set damaged ones aside
autockpt verify s3://bucket/run-7                         # read the newest copy back
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("path", metavar="RUN_DIR|DIR|ARCHIVE|URL")
@click.argument("generation", required=False)
@click.option("--all", "every", is_flag=True, help="Every committed checkpoint, not the newest.")
@click.option(
    "--with-records", "deep", is_flag=True, help="--all, and the records of the run beside them."
)
@click.option(
    "--quarantine",
    is_flag=True,
    help="--with-records, then mend what can be mended and set the rest aside.",
)
@common
def verify(
    console: Console, path: str, generation: str | None, every: bool, deep: bool, quarantine: bool
) -> int:
    """Read a checkpoint back and compare every chunk with its digest; exit code 65 on damage.

    UNREAD: the storage did not deliver the bytes, exit code 74.  Gone: a live run deleted the
    checkpoint.

    NaN in parameters or optimizer state is reported and does not count as damage.  --quarantine
    needs a directory that no run holds; it renames damaged checkpoints into quarantine/ and deletes
    nothing.
    """
    from autockpt.executors.storage.catalogue import list_generations
    from autockpt.executors.storage.directory.directory import CheckpointDirectory
    from autockpt.executors.storage.maintenance import damaged_records
    from autockpt.executors.storage.maintenance import repair as mend
    from autockpt.integrations.places import AGAIN, damaged_since, find_place
    from autockpt.values.errors import (
        ConfigError,
        CorruptCheckpointError,
        NoCheckpointError,
        StorageError,
    )
    from autockpt.values.policy_keys.paths import is_store_url
    from autockpt.values.record import to_data

    if archive.is_archive(path):
        return archive.verify(console, path, generation, every=every)
    place = find_place(path, in_store=True)
    if quarantine and is_store_url(place.directory):
        raise ConfigError(
            f"{path}: --quarantine needs a directory; bring the checkpoints into one first: "
            "autockpt pull URL RUN_DIR"
        )
    if quarantine:
        CheckpointDirectory(place.directory).require_unheld()
    if every or deep or quarantine:
        results = []
        for _ in range(AGAIN):  # a live run may delete all that were listed, and write others
            records = list_generations(place.directory)
            names = [record.name for record in records if record.state != "incomplete"]
            results += [_verified(console, place.directory, name) for name in names]
            if not names or not all(result.gone for result in results):
                break
    else:
        newest_is_meant = not (generation or place.generation)
        try:
            results = [_verified_one(console, place, generation)]
        except CorruptCheckpointError:
            if not newest_is_meant:
                raise
            results = []  # no checkpoint is whole
        if newest_is_meant:
            newer = damaged_since(place.directory, results[0].name if results else None)
            results += [_verified(console, place.directory, record.name) for record in newer]
    damages = damaged_records(place.directory) if deep or quarantine else []
    for damage in damages:
        console.result(f"{'DAMAGED ' if damage.readable else 'UNREAD  '} {damage.reason}")
    done = mend(place.directory, results) if quarantine else []
    for sentence in done:
        console.result(f"repaired {sentence}")
    there = [result for result in results if not result.gone]
    bad = [result.name for result in there if not result.ok]
    ok = not bad and not damages and (bool(there) or not results)
    console.object(
        "verify",
        {
            "directory": place.directory, "ok": ok, "results": to_data(results),
            "records": to_data(damages), "repaired": done,
        },
    )  # fmt: skip
    if results and not there:
        raise NoCheckpointError(
            f"{place.directory}: all {len(results)} checkpoints were deleted while they were read; "
            "see `autockpt ls`"
        )
    if not ok:
        beside = f" and {len(damages)} records" if damages else ""
        console.say(
            f"{len(bad)} of {len(there)} checkpoints{beside} damaged; a restore passes over them"
        )
        unread = all(not result.damaged for result in there if not result.ok)
        if unread and not any(damage.readable for damage in damages):
            return StorageError.exit_code
        return CorruptCheckpointError.exit_code
    return 0


def _verified(console: Console, directory: str, name: str) -> "VerifyResult":
    from autockpt.console.progress import Counted
    from autockpt.executors.storage.catalogue import verify_generation

    with console.progress(f"verify {name}") as progress:
        counted = Counted(progress)
        result = verify_generation(directory, name, gate=counted, expect=counted.expect)
    _tell(console, result)
    return result


def _verified_one(console: Console, place: "Place", named: str | None) -> "VerifyResult":
    """The one that is meant; where it is the newest and a live run deletes it, the next newest.

    Raises ConfigError for one that is named and has no COMMIT, CorruptCheckpointError where none is
    named and all are damaged.
    """
    from autockpt.integrations.places import AGAIN, choose
    from autockpt.values.errors import ConfigError

    for _ in range(AGAIN):
        result = _verified(console, place.directory, choose(place, named))
        if not result.gone:
            break
        if named or place.generation:
            raise ConfigError(
                f"{place.directory}/{result.name}: has no COMMIT: interrupted, still being written "
                "or just deleted; see `autockpt ls`"
            )
    return result


def _tell(console: Console, result: "VerifyResult") -> None:
    from autockpt.values.units import format_bytes

    if result.ok:
        size = format_bytes(result.bytes)
        console.result(f"ok       {result.name}: {size} in {result.shards} shards")
    elif result.gone:
        console.result(f"gone     {result.name}: deleted meanwhile")
    else:
        console.result(f"{'DAMAGED ' if result.damaged else 'UNREAD  '} {result.name}:")
        for problem in result.problems:
            console.result(f"         {problem}")
    if result.sick:
        console.result(f"SUSPECT  {result.name}: {result.sick}; not restored by itself")
