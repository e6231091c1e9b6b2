"""What an object store answers is named with a cure, and asked for again only so often."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.places import object_store
from autockpt.executors.storage.places.object_store import RETRIES, Objects
from autockpt.values.errors import ConfigError, StorageError
from tests.unit.executors.storage.remote.test_remote import account

ASKS: tuple[Callable[[Objects], object], ...] = (
    lambda objects: objects.write("a", b"1"),
    lambda objects: objects.create("a", b"1"),
    lambda objects: objects.read("a"),
    lambda objects: objects.listing("a"),
)


class Answers(ThreadingHTTPServer):
    """A store that gives one answer to all."""

    daemon_threads = True
    status, code, asked = 500, "", 0


class Answer(BaseHTTPRequestHandler):
    """An error as S3 writes it."""

    def do_GET(self) -> None:
        assert isinstance(self.server, Answers)
        self.server.asked += 1
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = f"<Error><Code>{self.server.code}</Code></Error>".encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_GET

    def do_HEAD(self) -> None:
        """Without a body, so without a code."""
        assert isinstance(self.server, Answers)
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answers]:
    """On this machine; the environment names it."""
    server = Answers(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    account(f"http://127.0.0.1:{server.server_port}", monkeypatch)
    yield server
    server.shutdown()
    thread.join(60)
    server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "cure"),
    [
        (403, "RequestTimeTooSkewed", "the clock of this machine is off"),
        (400, "ExpiredToken", "renew them"),
        (403, "InvalidAccessKeyId", "check AWS_ACCESS_KEY_ID"),
        (400, "InvalidToken", "check AWS_SESSION_TOKEN"),
        (403, "AccessDenied", "allow reading, writing, deleting, listing"),
        (404, "NoSuchBucket", "there is no such bucket"),
    ],
)
def test_an_error_is_named_with_its_cure_and_not_repeated(
    server: Answers, status: int, code: str, cure: str
) -> None:
    """One request each; a bucket that is not there is not taken for one without checkpoints."""
    server.status, server.code = status, code
    for ask in ASKS:
        said = rf"^s3://bucket/run/a: cannot \w+: {code}: .*{cure}"
        with pytest.raises(StorageError, match=said):
            ask(Objects("s3://bucket/run"))
    assert server.asked == len(ASKS)


def test_a_store_that_throttles_is_asked_only_so_often(server: Answers) -> None:
    """Then the error says it, and what helps."""
    server.status, server.code = 503, "SlowDown"
    with pytest.raises(StorageError, match=r"SlowDown: .*; save less often .*, or try again later"):
        Objects("s3://bucket/run").read("a")
    assert server.asked == RETRIES + 1


def test_a_directory_in_a_store_that_refuses_is_no_empty_one(server: Answers) -> None:
    """What would read as nothing there would begin the training from scratch."""
    server.status, server.code = 404, "NoSuchBucket"
    directory = CheckpointDirectory("s3://bucket/run")
    for ask in (directory.highest_term, directory.parents, directory.open, directory.ever_committed,
                lambda: directory.catalogue("run"),
                lambda: directory.claim("run", "launch", 0, force=True)):  # fmt: skip
        with pytest.raises(StorageError, match="NoSuchBucket: there is no such bucket"):
            ask()


def test_no_credentials_are_named_so() -> None:
    """The library tells of its last question, to an address at which clouds lend some."""
    said = OSError("Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token")
    assert "AWS_ACCESS_KEY_ID" in object_store._cause(said)
    assert "169.254" not in object_store._cause(said)


def test_a_name_that_no_object_can_have_is_a_mistake(tmp_path: Path) -> None:
    """Not an error of the library, which has no exit code."""
    with pytest.raises(ConfigError, match="can be no object"):
        Objects(f"file://{tmp_path}").write("a/../b", b"1")


def test_an_upload_gives_the_library_a_part_at_once(tmp_path: Path) -> None:
    """A state that is copied in one piece would be in memory twice."""
    upload = Objects(f"file://{tmp_path}").begin("a", 0)
    upload.part_bytes = 10
    given: list[bytes] = []
    upload._writer = SimpleNamespace(write=lambda piece: given.append(bytes(piece)))
    upload.write(memoryview(bytes(range(25))))
    assert [len(piece) for piece in given] == [10, 10, 5]
    assert b"".join(given) == bytes(range(25))


def test_an_upload_may_be_given_the_same_memory_again(tmp_path: Path) -> None:
    """As an encoder does with the next frame; also where many pieces make a part."""
    objects, memory, expected = Objects(f"file://{tmp_path}"), bytearray(4096), b""
    upload = objects.begin("a", 3 * 4096)
    for number in (1, 2, 3):
        memory[:] = bytes([number]) * len(memory)
        expected += bytes(memory)
        upload.write(memoryview(memory))
    memory[:] = bytes(len(memory))
    upload.finish()
    assert objects.read("a") == expected
