"""A process that outlives its credentials asks with the ones that hold now."""

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from autockpt.executors.storage.places import account
from autockpt.executors.storage.places.object_store import Objects
from autockpt.values.errors import StorageError
from tests.unit.executors.storage.remote.test_remote import account as named


class Doors(ThreadingHTTPServer):
    """A store that knows one key."""

    daemon_threads = True
    key = ""
    tokens: tuple[str | None, ...] = ()


class Door(BaseHTTPRequestHandler):
    """Every object holds `hi`, for the one who may read."""

    def do_GET(self) -> None:
        assert isinstance(self.server, Doors)
        used = re.search(r"Credential=(\w+)", self.headers.get("Authorization") or "")
        self.server.tokens += (self.headers.get("x-amz-security-token"),)
        known = used is not None and used[1] == self.server.key
        body = b"hi" if known else b"<Error><Code>ExpiredToken</Code></Error>"
        self.send_response(200 if known else 400)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def doors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Doors]:
    """On this machine; the environment names it, and has no key."""
    server = Doors(("127.0.0.1", 0), Door)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    named(f"http://127.0.0.1:{server.server_port}", monkeypatch)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    yield server
    server.shutdown()
    thread.join(60)
    server.server_close()


def write_keys(folder: Path, key: str, *, profile: str = "default", token: str = "") -> None:
    """The credentials file, as the cloud's tools write it."""
    lines = [f"[{profile}]", f"aws_access_key_id = {key}", "aws_secret_access_key = hush"]
    lines += [f"aws_session_token = {token}"] if token else []
    (folder / "credentials").write_text("\n".join([*lines, "region = there", ""]))


def test_keys_that_are_renewed_in_the_file_count_at_once(doors: Doors, tmp_path: Path) -> None:
    """The same objects first have old keys, then none, then new ones with a token."""
    write_keys(tmp_path, "OLD")
    objects = Objects("s3://bucket/run")
    doors.key = "OLD"
    assert objects.read("a") == b"hi"
    doors.key = "RENEWED"
    with pytest.raises(StorageError, match=r"ExpiredToken: .*renew them in the credentials file"):
        objects.read("a")
    write_keys(tmp_path, "RENEWED", token="lent")
    assert objects.read("a") == b"hi"
    assert doors.tokens[-1] == "lent"


def test_the_profile_is_the_one_that_the_environment_names(
    doors: Doors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile that is not there has no keys, and a file that is being written neither."""
    write_keys(tmp_path, "OTHER", profile="team")
    doors.key = "OTHER"
    file = account.credentials_file()
    assert account.keys_in(file) == {}
    monkeypatch.setenv("AWS_PROFILE", "team")
    assert Objects("s3://bucket/run").read("a") == b"hi"
    (tmp_path / "credentials").write_text("[te")
    assert account.keys_in(file) == {}


def test_keys_in_the_environment_go_before_the_file(
    doors: Doors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for the cloud's own tools."""
    write_keys(tmp_path, "OLD")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "OWN")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    doors.key = "OWN"
    assert Objects("s3://bucket/run").read("a") == b"hi"


def test_a_keeper_asks_as_the_trainers_that_came_last(
    doors: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a variable is gone; no other variable changes."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "OLD")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "lent")
    monkeypatch.setenv("HOME_OF_TEST", "here")
    objects = Objects("s3://bucket/run")
    doors.key = "NEW"
    new = dict(account.variables()) | {"AWS_ACCESS_KEY_ID": "NEW"}
    del new["AWS_SESSION_TOKEN"]
    assert account.adopt((*new.items(), ("HOME_OF_TEST", "elsewhere")))
    assert not account.adopt(tuple(new.items()))
    assert dict(account.variables()) == new
    assert objects.read("a") == b"hi"
    assert doors.tokens == (None,)


def test_a_file_is_handed_over_by_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A keeper works in another directory than the script that starts it."""
    monkeypatch.chdir(tmp_path)
    write_keys(tmp_path, "OLD")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "credentials")
    handed = dict(account.handed_over())
    assert handed["AWS_SHARED_CREDENTIALS_FILE"] == str(tmp_path / "credentials")
