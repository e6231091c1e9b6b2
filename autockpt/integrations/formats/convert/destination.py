"""Where an export goes: made beside its place, then moved there as a whole, or not at all.

An existing target is replaced on demand only, and only when it looks like an export.  A wrong path
after --force must not cost a directory of the user's work.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
import zipfile
from collections.abc import Iterator

from autockpt import new_files
from autockpt.values.errors import ConfigError, GuardError, StorageError

_EXPORTED = re.compile(
    r"(model(-\d{5}-of-\d{5})?|state)\.safetensors|model\.safetensors\.index\.json"
    r"|\.metadata|__\d+_[\d_]+\.distcp|(optimizer|scheduler|scaler)\.pt|trainer_state\.json"
)
"""Names of the files in a directory that an export makes."""


@contextlib.contextmanager
def new_export(path: str, *, force: bool) -> Iterator[str]:
    """A path beside `path` to write a file or directory to; it becomes `path` at the end.

    On any failure nothing is left.  Raises ConfigError when `path` is taken, GuardError when
    `force` would replace something that is no export, StorageError.
    """
    final = os.path.abspath(path)
    require_free(final, force=force)
    temporary = f"{os.path.dirname(final)}/.{os.path.basename(final)}.{secrets.token_hex(4)}"
    try:
        new_files.make_directory(os.path.dirname(final))
        yield temporary
        new_files.close_to_others(temporary)
        _publish(temporary, final, force=force)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written: {error.strerror}; nothing was left there"
        ) from error
    finally:
        _remove(temporary)


def require_free(path: str, *, force: bool) -> None:
    """Raises ConfigError or GuardError unless an export may be put at `path`."""
    if not os.path.lexists(path) or (os.path.isdir(path) and not os.listdir(path)):
        return
    if not force:
        raise ConfigError(f"{path}: exists; name another destination, or replace it with --force")
    if os.path.islink(path) or not (os.path.isdir(path) or os.path.isfile(path)):
        raise GuardError(f"{path}: is no plain file or directory, --force does not replace it")
    if os.path.isdir(path):
        strange = sorted(name for name in os.listdir(path) if not _EXPORTED.fullmatch(name))
        if strange:
            raise GuardError(
                f"{path}: holds {strange[0]!r}, which no export writes; --force replaces exports "
                "only, so remove the directory yourself or name another one"
            )
    elif not _is_torch_file(path):
        raise GuardError(
            f"{path}: is no file of torch.save; --force replaces exports only, so remove it "
            "yourself or name another one"
        )


def _is_torch_file(path: str) -> bool:
    """Whether torch.save may have written it: a zip file with a data.pkl, which is not read."""
    try:
        with zipfile.ZipFile(path) as file:
            return any(name.endswith("/data.pkl") for name in file.namelist())
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return False


def _publish(temporary: str, final: str, *, force: bool) -> None:
    """Moves the finished export to its place; without `force` never over anything."""
    if os.path.isdir(temporary):
        _fsync(temporary)
    if os.path.lexists(final) and force:
        require_free(final, force=True)
        old = f"{temporary}.old"
        os.rename(final, old)
        try:
            os.rename(temporary, final)
        except OSError:
            os.rename(old, final)
            raise
        _remove(old)
    elif os.path.isdir(temporary):
        os.rename(temporary, final)  # succeeds over nothing and over an empty directory only
    else:
        _link(temporary, final)
    _fsync(os.path.dirname(final))


def _link(temporary: str, final: str) -> None:
    try:
        os.link(temporary, final)
    except FileExistsError:
        raise ConfigError(f"{final}: appeared in the meantime; name another destination") from None
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        os.rename(temporary, final)  # a file system without links


def _fsync(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
