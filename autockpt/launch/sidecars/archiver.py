"""The archiver of a run, as far as the launcher goes."""

from autockpt.console import Console
from autockpt.launch.sidecars.sidecar import Sidecar
from autockpt.run_directory import RunDirectory
from autockpt.values.goal import Archiving

NAME = "archive"


def archivers(run: RunDirectory, wish: Archiving, console: Console) -> list[Sidecar]:
    """Return the archiver of the run's commits, if the policy wants one."""
    if wish.codec is None:
        return []
    if wish.lossy and wish.codec != "none":
        console.say(
            f"LOSSY archive of every checkpoint ({wish.codec}) in {run.path / NAME}; a "
            "restart resumes from exact checkpoints"
        )
    command = (
        "convert", str(run.path), str(run.path / NAME), "--to", "archive", "--codec",
        str(wish.codec), "--full-every", str(wish.full_every), "--follow",
    )  # fmt: skip
    return [Sidecar(name="archiver", command=command)]
