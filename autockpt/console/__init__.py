"""The terminal: what commands print, and progress of what takes long."""

from autockpt.console.terminal import (
    SCHEMA_VERSION,
    Console,
    local_time,
    no_output,
    save_traceback,
)

__all__ = ["SCHEMA_VERSION", "Console", "local_time", "no_output", "save_traceback"]
