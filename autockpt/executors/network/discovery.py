"""How the keepers of a run find and trust each other: `control/` in the checkpoint directory.

* `control/secret`: 32 random bytes, 0600; a process that can read it belongs to the run.
* `control/node-000.json`: the address of a node's keeper, written anew for every incarnation.
* `control/round.json`: the newest incarnation of a job on several nodes (`launch/rendezvous.py`).

The directory is 0700 and lies on the file system that all nodes share.  In an object store its
records are objects: who may read the run there may read the secret.  Only files and addresses live
here, no connection.
"""

import contextlib
import ipaddress
import os
import secrets
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass

from autockpt.executors.protocol.messages import Incarnation
from autockpt.executors.storage.directory.claims import boot_id
from autockpt.executors.storage.directory.records import read_small
from autockpt.executors.storage.places.choose import place_of
from autockpt.values.errors import AutockptError, ConfigError, StorageError
from autockpt.values.policy_keys.paths import is_store_url
from autockpt.values.record import from_json, to_json

SECRET_BYTES = 32
LOOPBACK = "127.0.0.1"
INTERFACE = "AUTOCKPT_CONTROL_INTERFACE"
_ELSEWHERE = "192.0.2.1"
"""Reserved for documentation (RFC 5737): the route to it is the default route."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperAddress:
    """control/node-NNN.json: where the keeper of a node listens."""

    schema_version: int = 1
    run_id: str
    node: int
    host: str
    """A numeric address: no name service is asked."""
    port: int
    transfer_port: int = 0
    """Where it lends what is in its memory; 0: it does not."""
    nonce: str
    """Differs for every keeper process."""
    incarnation: Incarnation
    """The newest one whose trainers this keeper serves; an address of another one is not used."""


def open_secret(checkpoints: str) -> bytes:
    """Return the secret of the run, which the first caller makes.

    Raises StorageError when another user could have read or written it.
    """
    folder = os.path.join(checkpoints, "control")
    path = os.path.join(folder, "secret")
    try:
        if is_store_url(path):
            _publish(path, secrets.token_bytes(SECRET_BYTES), replace=False)
            return read_small(path, limit=SECRET_BYTES)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        _require_ours(os.lstat(folder), folder)
        if not os.path.lexists(path):
            _publish(path, secrets.token_bytes(SECRET_BYTES), replace=False)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            _require_ours(status, path)
            if not stat.S_ISREG(status.st_mode) or status.st_size != SECRET_BYTES:
                raise StorageError(
                    f"{path}: {status.st_size} bytes, expected a file of {SECRET_BYTES}; remove it "
                    "while the run is stopped"
                )
            return os.read(fd, SECRET_BYTES)
        finally:
            os.close(fd)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from error


def read_secret(checkpoints: str) -> bytes | None:
    """The secret as this node sees it, and makes none; None while it sees none."""
    folder = os.path.join(checkpoints, "control")
    _look_again(folder if os.path.isdir(folder) else checkpoints)
    with contextlib.suppress(AutockptError, OSError):
        return read_small(os.path.join(folder, "secret"), limit=SECRET_BYTES)
    return None


def _require_ours(status: os.stat_result, path: str) -> None:
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StorageError(
            f"{path}: belongs to uid {status.st_uid} with mode {status.st_mode & 0o777:o}, "
            "expected our own, closed to all others. Use a file system that keeps modes, or "
            "remove it while the run is stopped"
        )


def write_address(checkpoints: str, address: KeeperAddress) -> None:
    """Tells the other keepers where this one listens.  Raises OSError."""
    _publish(_address_path(checkpoints, address.node), to_json(address).encode(), replace=True)


def read_address(checkpoints: str, node: int) -> KeeperAddress | None:
    """Where the keeper of `node` said it listens; None when there is nothing (readable)."""
    path = _address_path(checkpoints, node)
    _look_again(os.path.dirname(path))
    try:
        return from_json(KeeperAddress, read_small(path, limit=4096), where=path)
    except (AutockptError, OSError):
        return None


def write_record(checkpoints: str, name: str, text: bytes) -> None:
    """Replaces a file of `control/`.  Raises OSError."""
    _publish(os.path.join(checkpoints, "control", name), text, replace=True)


def read_record(checkpoints: str, name: str) -> bytes | None:
    """A file of `control/`; None when there is none.  Raises StorageError."""
    path = os.path.join(checkpoints, "control", name)
    try:
        return read_small(path, limit=2**20)
    except FileNotFoundError:
        return None
    except (AutockptError, OSError) as error:
        raise StorageError(f"{path}: cannot be read: {error}") from error


def _address_path(checkpoints: str, node: int) -> str:
    return os.path.join(checkpoints, "control", f"node-{node:03d}.json")


def _look_again(folder: str) -> None:
    """NFS clients remember names for up to a minute; a change of their own makes them look."""
    if is_store_url(folder):
        return
    path = os.path.join(folder, f"look-{secrets.token_hex(6)}.tmp")
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        os.unlink(path)


def _publish(path: str, data: bytes, *, replace: bool) -> None:
    """Whole or not at all; with `replace` False a file that is there stays."""
    if is_store_url(path):
        place_of(path).publish(path, data, replace=replace)
        return
    temporary = f"{path}.{secrets.token_hex(6)}.tmp"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.rename(temporary, path)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


# --------------------------------------------------------------------------- addresses


def network_of() -> str:
    """Names the machine and the network namespace: two processes with one name share loopback."""
    with contextlib.suppress(OSError):
        return f"{boot_id()} {os.readlink('/proc/self/ns/net')}"
    return f"{boot_id()} {os.uname().nodename}"


def listen_host(environment: Mapping[str, str], *, one_host: bool) -> str:
    """The address a keeper listens on: as configured, loopback, or the one that reaches the nodes.

    Never all interfaces.  Raises ConfigError when there is none that other nodes could reach.
    """
    named = environment.get(INTERFACE, "")
    if named:
        return _named(named)
    if one_host:
        return LOOPBACK
    # The master's own name often means loopback on the master; then the default route has to do.
    for target in (environment.get("MASTER_ADDR", ""), _ELSEWHERE):
        host = _source_address(target)
        if host:
            return host
    raise ConfigError(
        "no address of this node can be reached from other nodes; set "
        f"{INTERFACE} to a network interface or to an address of this node"
    )


def _named(name: str) -> str:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return _interface_address(name)
    if address.is_unspecified:
        raise ConfigError(f"{INTERFACE}={name}: name one interface or one address of this node")
    return name


def _interface_address(name: str) -> str:
    import psutil

    interfaces = psutil.net_if_addrs()
    if name not in interfaces:
        known = ", ".join(sorted(interfaces))
        raise ConfigError(f"{INTERFACE}={name}: no such interface; there are {known}")
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in interfaces[name]:
            if entry.family == family and not entry.address.startswith("fe80"):
                return str(entry.address)
    raise ConfigError(f"{INTERFACE}={name}: this interface has no address")


def _source_address(target: str) -> str:
    """Our address on the route to `target`; empty if that is loopback or there is no route."""
    if not target:
        return ""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, _, _, where in socket.getaddrinfo(target, 1, type=socket.SOCK_DGRAM):
            # Connecting a datagram socket sends nothing; it only chooses the route.
            with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
                probe.connect(where)
                host = str(probe.getsockname()[0]).partition("%")[0]
                address = ipaddress.ip_address(host)
                if not (address.is_loopback or address.is_unspecified or address.is_link_local):
                    return host
    return ""
