"""Marks in a checkpoint directory: VERIFIED, CORRUPT, SUSPECT, PINNED of a generation, and EVER."""

import contextlib
import os
import re

from autockpt.executors.storage.directory.records import (
    exists,
    is_there,
    names_in,
    publish,
    read_small,
    storage_error,
)
from autockpt.executors.storage.places.place import Place
from autockpt.values.errors import ConfigError, CorruptCheckpointError, OptionError
from autockpt.values.generation import Generation

_PIN = re.compile(r"(?!\d+$)[A-Za-z0-9_][\w.-]{0,63}", re.ASCII)


class Marks:
    """Leaves and reads marks; none of them is needed to read a checkpoint."""

    def __init__(self, path: str, place: Place) -> None:
        self.path = path
        self._place = place

    def is_suspect(self, generation: Generation) -> bool:
        """It was marked so when it was read back.  Raises OSError."""
        return is_there(os.path.join(self._folder(generation), "SUSPECT"))

    def mark(self, generation: Generation, name: str) -> bool:
        """Leaves a mark (VERIFIED, CORRUPT, SUSPECT) in a generation; False when it cannot.

        It survives a power cut before the next mark is left: VERIFIED without the SUSPECT before
        it would say that the numbers are sound.  Any other lost one is harmless.
        """
        folder = self._folder(generation)
        try:
            self._place.write(os.path.join(folder, name), b"")
            self._place.settle(folder)
        except OSError:
            return False
        return True

    def pin(self, generation: Generation, name: str) -> None:
        """Keeps a checkpoint under a name; retention passes it over.

        Raises ConfigError for a name that is taken or malformed and where there is no checkpoint,
        StorageError.
        """
        folder = self._folder(generation)
        commit = os.path.join(folder, "COMMIT")
        require_pin_name(name)
        other = self.pins().get(name)
        if other is not None and other != generation:
            raise ConfigError(f"{name}: is the name of {other.name}; remove that pin first")
        path = os.path.join(folder, "PINNED")
        with storage_error("pin", folder):
            if not is_there(commit):
                raise ConfigError(f"{folder}: holds no committed checkpoint; see `autockpt ls`")
            publish(path, f"{name}\n".encode(), replace=True)
            if not self._place.is_store:
                os.chmod(path, 0o644)  # of another user, the job reads it too
            if not is_there(commit):
                self._place.remove(path)
                raise ConfigError(f"{folder}: was deleted meanwhile; pin another checkpoint")

    def unpin(self, name: str) -> Generation:
        """Lets retention decide again; the checkpoint.  Raises ConfigError, StorageError."""
        pins = self.pins()
        if name not in pins:
            known = ", ".join(sorted(pins)) or "none"
            raise ConfigError(f"{self.path}: no checkpoint is pinned as {name!r}; pins: {known}")
        path = os.path.join(self._folder(pins[name]), "PINNED")
        with storage_error("remove", path):
            self._place.remove(path)
        return pins[name]

    def pins(self) -> dict[str, Generation]:
        """The pinned checkpoints by name.  Raises StorageError."""
        found = {}
        for name in names_in(self.path):
            with contextlib.suppress(ConfigError):
                generation = Generation.from_name(name)
                with storage_error("read", self._folder(generation)):
                    pinned = pin_of(self._folder(generation))
                if pinned:
                    found[pinned] = generation
        return found

    def mark_ever_committed(self) -> None:
        """Remembers that a restart must not silently begin from scratch."""
        path = os.path.join(self.path, "EVER")
        if not exists(path):
            with contextlib.suppress(OSError):
                self._place.write(path, b"something was committed once\n")
                self._place.settle(self.path)

    def ever_committed(self) -> bool:
        """True when some generation was once committed to memory or disk.  Raises StorageError."""
        path = os.path.join(self.path, "EVER")
        with storage_error("read", path):
            if self._place.is_store:  # a look at one object takes a missing bucket for an empty one
                return "EVER" in self._place.names(self.path)
            return is_there(path)

    def _folder(self, generation: Generation) -> str:
        return os.path.join(self.path, generation.name)


def pin_of(folder: str) -> str:
    """The name under which a person keeps a checkpoint; "": there is none.  Raises OSError.

    A mark whose text cannot be read counts too; then it is the path, and the reason.
    """
    path = os.path.join(folder, "PINNED")
    try:
        text = read_small(path, limit=4096)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except CorruptCheckpointError:
        return path
    except PermissionError as error:
        return f"{path}: {error.strerror}"
    return text.decode(errors="replace").strip() or "PINNED"


def require_pin_name(name: str) -> None:
    """Raises OptionError."""
    if not _PIN.fullmatch(name):
        raise OptionError(
            f"{name!r:.80}: expected letters, digits, '-', '_' and '.', at most 64, and not a "
            "number, which names a step; name the checkpoint with --generation"
        )
