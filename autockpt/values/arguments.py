"""Arguments of a script as they may be written down: without what looks like a secret.

A run directory and its report are shown around, and scripts get keys on their command line all the
same.  A secret is recognised by its option's name (`--api-key K`, `db.password=K`), by the form of
well-known keys, or as the user part of an address.  What looks like none of them is kept.
"""

import re
from collections.abc import Sequence

HIDDEN = "[secret]"
_KEYS = "api|access|secret|private|auth|encryption|license|wandb"
_TOKENS = "api|access|auth|bearer|refresh|session|hub|hf|wandb|github|gitlab"
_NAME = re.compile(
    rf"(?:.*[-_])?(?:passw(?:or)?d|passphrase|secret|credentials?|apikey|(?:{_KEYS})[-_]?key)"
    rf"|(?:(?:.*[-_])?(?:{_TOKENS})[-_]?)?token",
    re.IGNORECASE,
)
"""Of an option, without what stands before its last dot: not `--max-tokens`, not `--pad-token`."""
_FORM = re.compile(
    r"\b(?:hf_\w{20,}|sk-[\w-]{20,}|gh[opsur]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|AIza[\w-]{35}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})"
    r"|(?<=://)[^/@\s]+(?=@)"
)


def without_secrets(arguments: Sequence[str]) -> tuple[str, ...]:
    """The arguments, each secret replaced by `HIDDEN`; the same for the same arguments."""
    kept: list[str] = []
    named = False
    for argument in arguments:
        name, given, _ = argument.partition("=")
        if named and not argument.startswith("-"):
            kept.append(HIDDEN)
        elif given and _is_secret(name):
            kept.append(f"{name}={HIDDEN}")
        else:
            kept.append(_FORM.sub(HIDDEN, argument))
        named = not given and argument.startswith("-") and _is_secret(name)
    return tuple(kept)


def _is_secret(name: str) -> bool:
    return _NAME.fullmatch(name.lstrip("-+").rpartition(".")[2]) is not None
