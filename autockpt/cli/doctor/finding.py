"""One thing that doctor found out, and what to do about it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fact about this machine."""

    id: str
    """Stable, for scripts: memory.trainer_killed, storage.direct_io, ..."""
    status: Literal["ok", "note", "warning", "broken"]
    """broken: a part of autockpt cannot work here."""
    what: str
    """One sentence with numbers."""
    fix: str = ""
    """Action for the user; never empty for a warning or something broken."""
