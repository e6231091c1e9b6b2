"""`autockpt archive-eval`: the cost to a job of going on from a lossy generation."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from autockpt.cli.shared.options import WRAPPING, Command, Whole, common
from autockpt.console import Console
from autockpt.values.arguments import without_secrets

if TYPE_CHECKING:
    from autockpt.integrations.formats.archive.reading import Archive

EXAMPLES = """
autockpt archive-eval --archive runs/mine/archive train.py --seed {seed} --log-every 1
autockpt archive-eval --archive history --original runs/mine --steps 50 train.py --seed {seed}
"""
LOSS = r"loss[ =:]+([-+0-9.eE]+)"
NEVER = "1000000000 steps"
PATIENCE_S = 60.0
"""Between asking a resumed job to end and killing it."""
LAST_LINES, LONGEST = 20, 200
"""Of a job without enough losses: lines that are shown, and characters of each."""


@click.command(cls=Command, examples=EXAMPLES, context_settings=WRAPPING)
@click.option("--archive", metavar="DIR", required=True)
@click.option("--generation", metavar="NAME", help="Which one; otherwise the newest.")
@click.option("--original", metavar="RUN_DIR", help="Where it is kept lossless (default: beside).")
@click.option(
    "--steps", type=Whole(min=1), default=200, show_default=True, help="Iterations of each resume."
)
@click.option(
    "--lossless-runs",
    type=Whole(min=1),
    default=5,
    show_default=True,
    help="Lossless resumes to compare with.",
)
@click.option("--loss", default=LOSS, show_default=True, metavar="REGEX", help="In what it prints.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@common
def archive_eval(
    console: Console,
    archive: str,
    generation: str | None,
    original: str | None,
    steps: int,
    lossless_runs: int,
    loss: str,
    script: str,
    args: tuple[str, ...],
) -> int:
    """Resume SCRIPT from a lossy generation and, with several data orders, from its original.

    SCRIPT prints its loss once per iteration; `{seed}` in ARGS becomes 1, 2, ... and must change
    the order of its data.  The result is stored in the archive, and every later restore of the
    generation says it.  Exit code 1 when the loss is outside the spread of the lossless resumes.
    """
    from autockpt.integrations.formats.archive.quality import Quality, middle_seed, store_quality
    from autockpt.integrations.formats.archive.reading import Archive
    from autockpt.values.record import to_data

    job = Job(words=(script, *args), steps=steps, loss=_pattern(loss))
    job.check(lossless_runs)
    with contextlib.closing(Archive(archive)) as opened, _scratch(archive) as scratch:
        name = generation or opened.newest()
        starts = Starts(opened, name, original or os.path.dirname(os.path.abspath(archive)))
        lossless = []
        for seed in range(1, lossless_runs + 1):
            lossless.append(job.losses(starts.lossless(f"{scratch}/{seed}"), seed))
            console.say(f"lossless, seed {seed}: mean loss {statistics.fmean(lossless[-1]):.4f}")
        seed = middle_seed(lossless)
        lossy = job.losses(starts.lossy(f"{scratch}/lossy"), seed)
        found = Quality(
            generation=name, codec=opened.open(name).member.codec, steps=steps,
            lossless=tuple(map(statistics.fmean, lossless)), seed=seed,
            lossy=statistics.fmean(lossy), command=shlex.join(without_secrets(job.words)),
        )  # fmt: skip
        store_quality(opened, found)
    console.object("archive-eval", {**to_data(found), "inside": found.inside})
    console.result(f"{name} ({found.codec}): {found}")
    return 0 if found.inside else 1


def _pattern(text: str) -> "re.Pattern[str]":
    from autockpt.values.errors import OptionError

    try:
        pattern = re.compile(text)
    except re.error as error:
        raise OptionError(f"--loss {text!r}: no regular expression: {error}") from None
    if pattern.groups != 1:
        raise OptionError(f"--loss {text!r}: has {pattern.groups} groups, expected 1: the number")
    return pattern


@contextlib.contextmanager
def _scratch(archive: str) -> Iterator[str]:
    """A folder beside the archive for the runs that are tried."""
    folder = tempfile.mkdtemp(prefix="quality-", dir=os.path.dirname(os.path.abspath(archive)))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Starts:
    """Runs to resume from: state alone, without random states and place in the data."""

    def __init__(self, archive: "Archive", name: str, original: str) -> None:
        self._archive, self._name, self._original = archive, name, original

    def lossless(self, path: str) -> str:
        """From the original.  Raises ConfigError when it is gone."""
        return self._bare(self._original, self._name, path)

    def lossy(self, path: str) -> str:
        """From the archive."""
        from autockpt.integrations.formats.archive.restoring import restore_member

        restore_member(self._archive.path, f"{path}-whole", self._name)
        return self._bare(f"{path}-whole", None, path)

    @staticmethod
    def _bare(source: str, name: str | None, path: str) -> str:
        from autockpt.integrations.formats.convert.import_checkpoint import import_tree
        from autockpt.integrations.formats.tree.loading import opened

        with opened(source, generation=name) as found:
            import_tree(found.tree, path, models=found.models)
        return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The user's command, and how its losses are read."""

    words: tuple[str, ...]
    steps: int
    loss: "re.Pattern[str]"

    def check(self, lossless_runs: int) -> None:
        """Raises OptionError for a job that cannot be compared."""
        from autockpt.values.errors import OptionError

        if lossless_runs > 1 and not any("{seed}" in word for word in self.words):
            raise OptionError(
                "the command has no {seed}: without another data order the lossless resumes are "
                "all the same; e.g. train.py --seed {seed}"
            )

    def losses(self, run_dir: str, seed: int) -> list[float]:
        """Of the first `steps` iterations after the resume.  Raises ConfigError for fewer."""
        from autockpt.values.errors import ConfigError

        words = [word.replace("{seed}", str(seed)) for word in self.words]
        command = [
            sys.executable, "-m", "autockpt", "run", "-q", "--no-profile", "--run-dir", run_dir,
            "--set", "memory.enabled=false", "--set", f"disk.interval={NEVER}", *words,
        ]  # fmt: skip
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        ) as process:  # fmt: skip
            try:
                found, last = self._read(process)
                ended = None if len(found) == self.steps else _exit_code(process)
            finally:
                _end(process)
        if len(found) == self.steps:
            return found
        what = (
            f"printed {len(found)} losses that match {self.loss.pattern!r}, expected {self.steps}"
        )
        if ended:
            what = f"failed with exit code {ended}; it {what}"
        else:
            what += "; it must go on that far and print one per iteration"
        raise ConfigError(
            f"{shlex.join(without_secrets(words))}: {what}. Its last lines:\n"
            + textwrap.indent("\n".join(last), "  ")
        )

    def _read(self, process: "subprocess.Popen[str]") -> tuple[list[float], deque[str]]:
        """(losses, last lines); stops reading when there are enough."""
        found: list[float] = []
        last: deque[str] = deque(maxlen=LAST_LINES)
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip():
                last.append(line.rstrip()[:LONGEST])
            match = self.loss.search(line)
            if match is not None:
                with contextlib.suppress(ValueError):
                    found.append(float(match.group(1)))
            if len(found) == self.steps:
                break
        return found, last


def _exit_code(process: "subprocess.Popen[str]") -> int | None:
    """Of a job that has closed its output; None where it goes on all the same."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(PATIENCE_S)
    return None


def _end(process: "subprocess.Popen[str]") -> None:
    """The launcher ends its ranks and lets its keeper go."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=PATIENCE_S)
        return
    os.killpg(process.pid, signal.SIGKILL)
