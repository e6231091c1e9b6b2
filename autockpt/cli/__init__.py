"""The command line: one file per command, thin; everything it does can be done from Python too.

Importing this package costs nothing, because workers import it too (`autockpt.cli.script_runner`).
"""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `autockpt` command; ends the process with its exit code."""
    from autockpt.cli.app import run

    code = run(sys.argv[1:] if argv is None else list(argv))
    if callable(code):
        # The user's script runs from here, with nothing of the command line on the stack.
        code = code()
    sys.exit(code)
