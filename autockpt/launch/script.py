"""The training that is launched."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The user's command line."""

    target: str
    """Absolute path of the file, or the module's name."""
    module: bool
    args: tuple[str, ...]
    shown: str
    """The script as the user wrote it."""
