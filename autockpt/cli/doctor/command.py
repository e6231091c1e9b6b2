"""`autockpt doctor`: what this machine can and cannot do, each finding with its fix."""

import os

import click

from autockpt.cli.shared.options import Command, common
from autockpt.console import Console

EXAMPLES = """
autockpt doctor                          # checkpoints would go to runs/ in here
autockpt doctor /mnt/checkpoints
autockpt doctor --json | jq '.findings[] | select(.status == "warning")'
"""
UNAVAILABLE = 69
"""Exit code when a part of autockpt cannot work here."""

_STYLES = {"ok": "green", "note": "blue", "warning": "yellow", "broken": "bold red"}


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("directory", default=".")
@common
def doctor(console: Console, directory: str) -> int:
    """Try out what autockpt relies on: memory, files in DIRECTORY, limits, GPUs, versions.

    Starts and kills a few small processes of its own; writes one small file in DIRECTORY and
    removes it.  Exit code 69 when something that is needed does not work.
    """
    from autockpt.cli.doctor import machine, memory_tier, storage
    from autockpt.values.errors import ConfigError
    from autockpt.values.record import to_data

    if "://" in directory:
        raise ConfigError(
            f"{directory}: expected a directory, got a URL; `autockpt ls URL` asks a store, and "
            "`autockpt profile --set disk.path=URL SCRIPT` measures it"
        )
    if not os.path.isdir(directory):
        raise ConfigError(f"{directory}: no such directory; pass one where checkpoints would go")
    # The memory tier first: it forks, which is safe only before torch or NVML start threads.
    findings = memory_tier.check() + storage.check(directory) + machine.check()
    broken = [finding for finding in findings if finding.status == "broken"]
    console.object("doctor", {"ok": not broken, "findings": to_data(findings)})
    for finding in findings:
        console.styled(f"{finding.status:<8} {finding.what}", _STYLES[finding.status])
        if finding.fix and finding.status != "ok":
            console.result(f"         fix: {finding.fix}")
    counts = {status: sum(f.status == status for f in findings) for status in _STYLES}
    console.say(", ".join(f"{count} {status}" for status, count in counts.items() if count))
    console.next("autockpt profile train.py")
    return UNAVAILABLE if broken else 0
