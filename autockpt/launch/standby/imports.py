"""The libraries that a rank has imported, and the variables that its script has set.

A rank writes it down when its training is under way; its standby imports the same.  The user's own
modules are not among them.  They run anew, so that their import effects happen in every
incarnation, and an edited file is read.
"""

import functools
import os
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path

from autockpt import new_files
from autockpt.values.errors import AutockptError
from autockpt.values.record import from_json, to_json

Stamp = tuple[int, int, int]
"""When a file was changed, in ns, its size and its inode."""
FOLDER = "standby"
_PACKAGE = Path(__file__).resolve().parents[2]
_environment: dict[str, str] = {}
_script_began_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Imports:
    """The imports of one rank when its training was under way."""

    schema_version: int = 1
    modules: dict[str, str] = field(default_factory=dict)
    """File by name of each module of a library, in the order of their imports; "": no file."""
    changed: tuple[str, ...] = ()
    """Environment variables that differ from the start of the script."""


def path_of(run_directory: str | os.PathLike[str], rank: int) -> Path:
    """Where a rank's record stands."""
    return Path(run_directory) / FOLDER / f"imports-{rank:05d}.json"


def script_begins() -> None:
    """Remembers the environment in which the script starts, and when."""
    global _script_began_ns
    _script_began_ns = time.time_ns()
    _environment.clear()
    _environment.update(os.environ)


def environment_given() -> dict[str, str]:
    """The environment in which the script started; without a launcher, the present one."""
    return dict(_environment or os.environ)


def script_began_ns() -> int | None:
    """When the script started, in ns since the epoch; None without a launcher."""
    return _script_began_ns


def write(run_directory: str, rank: int) -> None:
    """Writes down what this process has imported.  Raises OSError.

    Not of a process that the script has started: the launcher starts none like it.
    """
    if not _environment:
        return
    modules = {
        name: file
        for name, module in list(sys.modules.items())
        if name != "__main__" and (file := file_of(module)) is not None and is_library(file)
    }
    names = _environment.keys() | os.environ.keys()
    changed = {name for name in names if _environment.get(name) != os.environ.get(name)}
    path = path_of(run_directory, rank)
    new_files.make_directory(path.parent, new_files.PRIVATE_DIRECTORY)
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8", opener=new_files.private) as out:
        out.write(to_json(Imports(modules=modules, changed=tuple(sorted(changed)))))
    os.replace(temporary, path)


def read(path: Path) -> Imports | None:
    """The record at `path`, None where there is none that can be read."""
    try:
        return from_json(Imports, path.read_text(encoding="utf-8"), where=str(path))
    except (OSError, ValueError, AutockptError):
        return None


def file_of(module: object) -> str | None:
    """File of a module, "" for one that is built in; None: it is not imported by itself.

    Namespace packages have no file; importing one of their modules imports them too.
    """
    spec = getattr(module, "__spec__", None)
    if spec is None or spec.name != getattr(module, "__name__", None):
        return None
    if spec.origin is None and spec.submodule_search_locations is not None:
        return None
    origin = spec.origin
    return origin if isinstance(origin, str) and os.path.isabs(origin) else ""


def is_library(file: str) -> bool:
    """Whether a module's file belongs to Python, to an installed package or to us."""
    return not file or file.startswith(_library_roots())


@functools.cache
def _library_roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
    found |= {os.path.realpath(path) for path in found} | {str(_PACKAGE)}
    return tuple(sorted(path.rstrip(os.sep) + os.sep for path in found))


def stamp(path: str) -> Stamp | None:
    """Of a file now; None: it cannot be read."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
