"""`autockpt completion SHELL`: the script that makes a shell complete our commands and options."""

import click

from autockpt.cli.shared.options import Command, common
from autockpt.console import Console

EXAMPLES = """
autockpt completion bash >> ~/.bashrc
autockpt completion fish > ~/.config/fish/completions/autockpt.fish
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@common
def completion(console: Console, shell: str) -> None:
    """Print the completion script of SHELL."""
    from click.shell_completion import get_completion_class

    from autockpt.cli.app import COMPLETE, cli
    from autockpt.cli.shared.completions import BASH

    found = get_completion_class(shell)
    assert found is not None
    words = found(cli, {}, "autockpt", COMPLETE)
    source = BASH % words.source_vars() if shell == "bash" else words.source()
    console.object("completion", {"shell": shell, "script": source})
    console.result(source)
