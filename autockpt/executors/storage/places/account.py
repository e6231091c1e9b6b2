"""The account that object stores are asked as: the environment, or a credentials file beside it.

A process may live longer than its credentials.  A keeper takes over the environment of the trainers
that it serves.  The credentials file of the cloud's own tools is read again when it has changed.
"""

import configparser
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

PREFIXES = ("AWS_", "GOOGLE_", "AZURE_")
"""Variables of the environment that name a store's address and account."""
_KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "token",
}
"""Entries of a credentials file, and the library's names of them."""
_OTHER_SOURCES = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")
"""A variable that goes before the credentials file."""
_FILES = (
    "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "AWS_WEB_IDENTITY_TOKEN_FILE",
    "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH",
    "AZURE_FEDERATED_TOKEN_FILE",
)  # fmt: skip
"""Variables that name a file."""
_lock = threading.RLock()

Account = tuple[tuple[str, str], ...]
"""Variables with their values, sorted."""


@contextmanager
def unchanged() -> Iterator[None]:
    """Within it `adopt` changes nothing: the library reads the environment by itself."""
    with _lock:
        yield


def variables() -> Account:
    """The account as the environment names it now."""
    with _lock:
        return tuple(sorted(item for item in os.environ.items() if item[0].startswith(PREFIXES)))


def handed_over() -> Account:
    """The account for a process in another working directory: its files by their whole paths."""
    return tuple(
        (name, os.path.abspath(value) if name in _FILES and os.path.isfile(value) else value)
        for name, value in variables()
    )


def adopt(account: Account) -> bool:
    """Makes the environment name `account`; False: it does already.

    Other variables are passed over.
    """
    wanted = {name: value for name, value in account if name.startswith(PREFIXES)}
    with _lock:
        now = dict(variables())
        for name in now.keys() - wanted.keys():
            del os.environ[name]
        for name, value in wanted.items():
            if now.get(name) != value:
                os.environ[name] = value
    return now != wanted


def credentials_file() -> str:
    """The file with the keys of S3; "" where the environment has them, or there is none."""
    if any(os.environ.get(name) for name in _OTHER_SOURCES):
        return ""
    named = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials"
    path = os.path.expanduser(named)
    return path if os.path.isfile(path) else ""


def version() -> tuple[object, ...]:
    """Differs when the environment names another account, or the file was written anew."""
    path = credentials_file()
    if not path:
        return variables()
    try:
        found = os.stat(path)
    except OSError:
        return variables()
    return *variables(), path, found.st_ino, found.st_size, found.st_mtime_ns


def s3_keys() -> Mapping[str, str]:
    """Keys of S3 by the library's names; empty where another source lends them."""
    if not os.environ.get("AWS_ACCESS_KEY_ID"):
        return keys_in(credentials_file())
    found = {ours: os.environ.get(name.upper(), "") for name, ours in _KEYS.items()}
    return {name: value for name, value in found.items() if value}


def keys_in(path: str) -> Mapping[str, str]:
    """The keys of AWS_PROFILE in a credentials file, by the library's names.

    Empty where it cannot be read or has no such profile: it may be written just now.
    """
    parser = configparser.RawConfigParser()
    try:
        with open(path, encoding="utf-8") as file:
            parser.read_file(file)
        profile = parser[os.environ.get("AWS_PROFILE") or "default"]
    except (OSError, ValueError, KeyError, configparser.Error):
        return {}
    return {ours: profile[name] for name, ours in _KEYS.items() if profile.get(name)}
