"""An object store: S3, Google's, Azure's, or a mounted directory (`file:///...`), through obstore.

An object is there whole or not at all, and can be put on the condition that it is not there yet.
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from autockpt.executors.storage.places import account
from autockpt.executors.storage.places.place import MAX_RECORD_BYTES
from autockpt.executors.storage.shard_file import run_parallel
from autockpt.executors.throttle.rate_limit import Throttle
from autockpt.values.errors import (
    ConfigError,
    CorruptCheckpointError,
    NoCheckpointError,
    StorageError,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

PART_BYTES = 8 * 2**20
"""Of a multipart upload, and of one request of a download.  S3 takes parts from 5 MiB on."""
MOST_PARTS = 9000
"""Of one object; S3 takes 10,000."""
STREAMS = 4
"""Parts under way at once, each way."""
RETRIES = 4
"""Of one request that can be repeated; how long one may take stands in the environment."""
SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https", "file")
"""The library's, without the one whose objects end with the process."""

_LENDERS = ("169.254.169.254", "169.254.170.2")
"""Addresses at which a cloud lends credentials to its machines: asked where there are no others."""
_CODE = re.compile(r"<Code>(\w+)</Code>")
_WRONG = "the store does not know these credentials; check AWS_ACCESS_KEY_ID and its secret"
_EXPIRED = (
    "the credentials have expired; renew them in the credentials file, which is read again, or "
    "start again with new ones in the environment"
)
_THROTTLED = (
    f"the store asks for fewer requests, also after {RETRIES} repetitions; save less often "
    "(disk.interval), send copies slower (remote.rate), or try again later"
)
_SILENT = "the store does not answer; check its address (S3: AWS_ENDPOINT_URL) and the network"
_CURES = {
    "AccessDenied": "these credentials may not do this; allow reading, writing, deleting, listing",
    "ExpiredToken": _EXPIRED,
    "InvalidAccessKeyId": _WRONG,
    "InvalidToken": "the session token is wrong; check AWS_SESSION_TOKEN",
    "NoSuchBucket": "there is no such bucket; make it, or check its name and AWS_ENDPOINT_URL",
    "RequestTimeTooSkewed": "the clock of this machine is off; set it (timedatectl set-ntp true)",
    "ServiceUnavailable": _THROTTLED,
    "SignatureDoesNotMatch": "the secret key is wrong; check AWS_SECRET_ACCESS_KEY",
    "SlowDown": _THROTTLED,
    "TokenRefreshRequired": _EXPIRED,
}
"""Cures by the codes of S3's answers."""


class Objects:
    """The objects under one URL.  An error of the store is a StorageError that names the object."""

    def __init__(self, url: str, *, store: "ObjectStore | None" = None) -> None:
        """`store`: in the place of the one that `url` names.

        Raises ConfigError for a URL that names no store, or that holds a key.
        """
        self.url = url.rstrip("/")
        self._account = account.version()
        self._store: Any = _open(url) if store is None else store
        self._folder = _folder(url) if store is None else None
        self._has_account = store is None and self._folder is None
        self._replaces = False
        """The store has shown that it honours the condition of `replace`."""

    @property
    def store(self) -> Any:
        """The library's store, which is opened again for renewed credentials.

        Raises ConfigError for an environment that names no store any more.
        """
        if self._has_account and (now := account.version()) != self._account:
            self._store, self._account = _open(self.url), now
        return self._store

    def create(self, name: str, body: bytes) -> bool:
        """Puts a small object if none is there; False when there is one."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self.asking("write", name):
            try:
                obstore.put(self.store, name, body, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
            self.settle(name)
        return True

    def write(self, name: str, body: bytes) -> None:
        """Puts a small object, also over one that is there."""
        import obstore

        with self.asking("write", name):
            obstore.put(self.store, name, body, use_multipart=False)
            self.settle(name)

    def replace(self, name: str, old: bytes, new: bytes) -> bool:
        """Puts a small object over one that holds `old`; False where it holds something else.

        Of several callers one gets True.  After an error the put may still come, until the object
        changes otherwise.
        """
        if self._folder is not None:
            return self._replace_file(self._folder, name, old, new)
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with contextlib.suppress(FileNotFoundError), self.asking("read", name):
            found = obstore.get(self.store, name)
            if found.meta["size"] != len(old) or bytes(found.bytes()) != old:
                return False
            with self.asking("write", name):
                try:
                    self._put_over(found.meta, name, new)
                except (AlreadyExistsError, PreconditionError, FileNotFoundError):
                    # A request that is repeated may meet what its first attempt has put.
                    return self.read(name) == new
            return True
        return False

    def _put_over(self, version: Any, name: str, body: bytes) -> None:
        """Puts `body` over one version of an object, which the library's answers name."""
        import obstore

        known = {key: version[key] for key in ("e_tag", "version") if version.get(key)}
        obstore.put(self.store, name, body, mode=known, use_multipart=False)  # type: ignore[arg-type]

    def _replace_file(self, folder: str, name: str, old: bytes, new: bytes) -> bool:
        """`replace` in a mounted directory: the folder's lock excludes other processes."""
        import obstore

        path = os.path.join(folder, name)
        with contextlib.suppress(FileNotFoundError), self.asking("read", name):
            fd = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if self.read(name) != old:
                    return False
                with self.asking("write", name):
                    obstore.put(self.store, name, new, use_multipart=False)
                    self.settle(name)
                return True
            finally:
                os.close(fd)
        return False

    def require_replacing(self, name: str) -> None:
        """Raises StorageError for a store that ignores the condition of `replace`.

        It is asked once, with an object `name` that is removed again.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        if self._replaces or self._folder is not None:
            return
        with self.asking("write", name):
            try:
                first = obstore.put(self.store, name, b"first", use_multipart=False)
                obstore.put(self.store, name, b"second", use_multipart=False)
                self._put_over(first, name, b"third")
            except (AlreadyExistsError, PreconditionError):
                self._replaces = True
            finally:
                self.delete(name)
        if not self._replaces:
            raise StorageError(
                f"{self.url}/{name}: the store ignores the condition of a put (If-Match): it "
                "replaced an object that had changed"
            )

    def read(self, name: str, limit: int = MAX_RECORD_BYTES) -> bytes | None:
        """A record; None: there is none.  Raises CorruptCheckpointError when it is too long."""
        import obstore

        with contextlib.suppress(FileNotFoundError), self.asking("read", name):
            found = obstore.get(self.store, name)
            if found.meta["size"] > limit:
                raise CorruptCheckpointError(
                    f"{self.url}/{name}: {found.meta['size']} bytes, expected a small record"
                )
            return bytes(found.bytes())
        return None

    def delete(self, name: str) -> None:
        """It is gone; also when it was."""
        import obstore

        with contextlib.suppress(FileNotFoundError), self.asking("delete", name):
            obstore.delete(self.store, name)

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of the objects in a folder, by the rest of their names."""
        import obstore

        with self.asking("list", folder):
            return {
                str(found["path"]).removeprefix(f"{folder}/"): found["size"]
                for page in obstore.list(self.store, folder)
                for found in page
            }

    def size(self, name: str) -> int | None:
        """Bytes of an object; None: there is none, or no such bucket, as listings say."""
        import obstore

        with contextlib.suppress(FileNotFoundError), self.asking("read", name):
            return int(obstore.head(self.store, name)["size"])
        return None

    def listing(self, folder: str) -> dict[str, int]:
        """Bytes of the objects right in a folder, by the rest of their names; of folders in it 0.

        `folder` "": the top.
        """
        import obstore

        prefix = f"{folder}/" if folder else ""
        with self.asking("list", folder):
            found = obstore.list_with_delimiter(self.store, folder or None)
        names = (str(path).rstrip("/") for path in found["common_prefixes"])
        inside = {name.removeprefix(prefix): 0 for name in names}
        objects = {str(at["path"]).removeprefix(prefix): at["size"] for at in found["objects"]}
        return inside | objects

    def folders(self) -> list[str]:
        """Names of the folders at the top."""
        import obstore

        with self.asking("list", ""):
            listed = obstore.list_with_delimiter(self.store)["common_prefixes"]
        return sorted(str(prefix).rstrip("/") for prefix in listed)

    def upload(self, path: str, name: str, size: int, gate: Throttle) -> None:
        """Puts a file of `size` bytes, part by part as `gate` lets them pass.

        Raises NoCheckpointError when it got shorter, OSError when it cannot be read, StorageError.
        """
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            upload = self.begin(name, size)
            part = upload.part_bytes
            for start in range(0, size, part):
                piece = os.pread(fd, part, start)
                if len(piece) != min(part, size - start):
                    raise NoCheckpointError(
                        f"{path}: ended at {start + len(piece)} of {size} bytes"
                    )
                gate.wait(len(piece))
                upload.write(piece)
            upload.finish()
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def download(self, name: str, path: str, size: int, moved: Callable[[int], None]) -> None:
        """Writes an object of `size` bytes to a file, durably; `moved` hears of bytes, from
        several threads.

        Raises CorruptCheckpointError when it is another size or gone, OSError, StorageError.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o644)
        try:

            def piece(start: int) -> None:
                data = self.read_range(name, start, min(start + PART_BYTES, size))
                while data:
                    count = os.pwrite(fd, data, start)
                    start, data = start + count, data[count:]
                    moved(count)

            run_parallel(range(0, size, PART_BYTES), piece, workers=STREAMS)
            os.fsync(fd)
        finally:
            os.close(fd)

    def read_range(self, name: str, start: int, stop: int) -> memoryview:
        """The bytes from `start` to `stop`.

        Raises CorruptCheckpointError where the object is gone or shorter, StorageError.
        """
        import obstore

        try:
            with self.asking("read", name):
                got = memoryview(obstore.get_range(self.store, name, start=start, end=stop))
        except FileNotFoundError:
            raise CorruptCheckpointError(f"{self.url}/{name}: was deleted") from None
        if len(got) != stop - start:
            raise CorruptCheckpointError(
                f"{self.url}/{name}: ends at {start + len(got)} bytes, expected at least {stop}"
            )
        return got

    def begin(self, name: str, most_bytes: int) -> "Upload":
        """An upload in parts of an object that will have at most `most_bytes`."""
        return Upload(self, name, most_bytes)

    def settle(self, name: str) -> None:
        """In a directory an object is a file, and durable when it and its folders are."""
        if self._folder is None:
            return
        path = os.path.join(self._folder, name)
        while len(path) >= len(self._folder):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            path = os.path.dirname(path)

    @contextlib.contextmanager
    def asking(self, verb: str, name: str) -> Iterator[None]:
        """FileNotFoundError of a read or a deletion stays: absence is an answer.

        Raises ConfigError for a name that no object can have, StorageError.
        """
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, OSError) as error:
            absent = isinstance(error, FileNotFoundError) and _code(error) != "NoSuchBucket"
            if absent and verb in ("read", "delete"):
                raise
            where = f"{self.url}/{name}"
            raise StorageError(f"{where}: cannot {verb}: {_cause(error)}") from error
        except ValueError as error:
            raise ConfigError(f"{self.url}/{name}: can be no object: {error}") from error


class Upload:
    """An object that is being put in parts, in order.  Only `finish` makes it one.

    Memory: `STREAMS` parts on their way and the one that fills.  Used from one thread at a time.
    """

    def __init__(self, objects: Objects, name: str, most_bytes: int) -> None:
        import obstore

        self._objects, self._name = objects, name
        self.part_bytes = max(PART_BYTES, -(-most_bytes // MOST_PARTS))
        with objects.asking("write", name):
            self._writer: Any = obstore.open_writer(
                objects.store, name, buffer_size=self.part_bytes, max_concurrency=STREAMS
            )

    def write(self, piece: bytes | memoryview) -> None:
        """The next bytes; the memory they are in may change behind it.  Raises StorageError.

        At most a part is copied at once.  The library makes no copy: it refers to that memory until
        the part is sent.
        """
        with self._objects.asking("write", self._name):
            for start in range(0, len(piece), self.part_bytes):
                self._writer.write(bytes(piece[start : start + self.part_bytes]))

    def finish(self) -> None:
        """The object is there, and durable.  Raises StorageError."""
        with self._objects.asking("write", self._name):
            self._writer.close()
            self._objects.settle(self._name)


def _open(url: str) -> "ObjectStore":
    scheme, found, rest = url.partition("://")
    if "?" in url or "@" in rest.partition("/")[0] or ("@" in url and ":" in (rest or url)):
        raise ConfigError(
            "the URL of an object store names a user or an option; keys and options stand in the "
            "environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, GOOGLE_..., AZURE_...)"
        )
    if not found or scheme not in SCHEMES or not rest.strip("/"):
        raise ConfigError(
            f"{url}: no object store; expected s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, "
            "az://CONTAINER/PREFIX or file:///DIRECTORY"
        )
    if scheme in ("http", "https"):
        raise ConfigError(
            f"{url}: a web address cannot be written to. For MinIO and other S3 servers use "
            "s3://BUCKET/PREFIX with AWS_ENDPOINT_URL in the environment, and AWS_ALLOW_HTTP=true "
            "for http"
        )
    is_s3 = scheme in ("s3", "s3a")
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT") if is_s3 else ():
        endpoint = os.environ.get(name)
        if endpoint is not None and not re.match(r"https?://\w", endpoint):  # the library panics
            raise ConfigError(
                f"{name}: expected the address of a store, such as https://minio.site:9000, got "
                f"{endpoint!r:.80}; correct or unset it"
            )
        if endpoint is not None and endpoint.startswith("http:") and not _allows_http():
            raise ConfigError(
                f"{name}: {endpoint:.80} is reached without encryption; AWS_ALLOW_HTTP=true in the "
                "environment allows that"
            )
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        raise ConfigError(
            f"{url}: copies in an object store need obstore; pip install 'autockpt[remote]'"
        ) from None
    options: dict[str, Any] = {"mkdir": True}
    if scheme != "file":
        # No client_options: they would take the place of those in the environment.
        options = {"retry_config": {"max_retries": RETRIES}}
    if is_s3 and (keys := account.keys_in(account.credentials_file())):
        options["config"] = dict(keys)
    try:
        with account.unchanged():
            return from_url(url, **options)
    except (BaseError, ValueError, OSError) as error:
        raise ConfigError(f"{url}: cannot be opened as an object store: {_cause(error)}") from error


def _allows_http() -> bool:
    return os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("true", "1", "yes", "on")


def _folder(url: str) -> str | None:
    parts = urlsplit(url)
    return unquote(parts.path).rstrip("/") if parts.scheme == "file" else None


def _cause(error: BaseException) -> str:
    """The store's own word for it, and a cure; else the first line of the library's text."""
    code = _code(error)
    if code in _CURES:
        return f"{code}: {_CURES[code]}"
    if any(address in str(error) for address in _LENDERS):
        return (
            "no credentials: none stand in the environment (AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY) or in a credentials file (AWS_SHARED_CREDENTIALS_FILE), and "
            "this machine lends none"
        )
    text = str(error).partition("\n")[0] or type(error).__name__
    return f"{_SILENT} ({text})" if "error sending request" in text else text


def _code(error: BaseException) -> str:
    """The code in the answer of a store; "" where it has none."""
    found = _CODE.search(str(error))
    return found[1] if found else ""
