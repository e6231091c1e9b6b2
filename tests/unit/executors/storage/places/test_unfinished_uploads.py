"""Uploads that were cut off are listed and ended, by requests that a store takes for signed."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, parse_qsl, urlsplit

import pytest

from autockpt.executors.storage import maintenance
from autockpt.executors.storage.directory import removal
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.places import unfinished_uploads
from autockpt.executors.storage.places.account import s3_keys
from autockpt.executors.storage.places.choose import place_of
from autockpt.executors.storage.places.object_store import PART_BYTES, Objects
from autockpt.executors.storage.places.unfinished_uploads import (
    UnfinishedUpload,
    end_uploads_before,
    end_uploads_of,
)
from autockpt.values.errors import StorageError
from autockpt.values.generation import Generation
from tests.unit.executors.storage.remote.test_remote import account, endpoint, s3

__all__ = ["endpoint", "s3"]


class Uploads(ThreadingHTTPServer):
    """A bucket with uploads by key, and every request that came."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.keys: list[str] = []
        self.came: list[tuple[str, str, dict[str, str]]] = []
        self.refuses: Callable[[str], bool] = lambda prefix: False
        """Whether uploads under a prefix may not be listed."""


class _Request(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server, query = self.server, parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        assert isinstance(server, Uploads)
        server.came.append((self.command, self.path, dict(self.headers)))
        if "uploads" in query and server.refuses(query["prefix"][0]):
            self.send_error(403)
            return
        if self.command == "DELETE":
            server.keys.remove(urlsplit(self.path).path.removeprefix("/bucket/"))
        uploads = "".join(
            f"<Upload><Key>{key}</Key><UploadId>id&amp;{n}</UploadId></Upload>"
            for n, key in enumerate(server.keys)
            if key.startswith(query.get("prefix", ["-"])[0])
        )
        body = f"<ListMultipartUploadsResult>{uploads}</ListMultipartUploadsResult>".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_DELETE = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Uploads]:
    """On this machine; the environment names it."""
    server = Uploads()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    account(f"http://127.0.0.1:{server.server_port}", monkeypatch)
    yield server
    server.shutdown()
    thread.join(60)
    server.server_close()


def shard(term: int, run: str = "run") -> str:
    """The key of a shard of a start."""
    return f"{run}/{Generation(term=term, step=4).name}/shard-00000-a1.safetensors"


def test_uploads_of_older_starts_are_ended(server: Uploads) -> None:
    """Those of this start go on, and so do those of another run, or of no run."""
    kept = [shard(3), shard(1, "other"), shard(1, "run-2"), "run/video.mp4"]
    server.keys = [shard(1), *kept, shard(2)]
    assert end_uploads_before("s3://bucket/run", 3) == 2
    assert server.keys == kept
    assert "uploadId=id%260" in server.came[1][1]
    assert end_uploads_before("gs://bucket/run", 3) == 0
    assert end_uploads_before("/a/directory", 3) == 0


def test_without_keys_or_an_answer_nothing_is_ended(
    server: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not an error: a rule of the bucket does the same."""
    server.keys = [shard(1)]
    with monkeypatch.context() as patch:
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
        assert end_uploads_before("s3://bucket/run", 3) == 0
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert end_uploads_before("s3://bucket/run", 3) == 0
    assert server.came == []


def test_a_sweep_keeps_no_commit_waiting(server: Uploads, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends at the first request that fails, and when its time is over."""
    server.keys = [shard(1, f"run/{n}") for n in range(3)]
    uploads = [
        UnfinishedUpload(bucket="bucket", key=key, upload_id="1", term=1) for key in server.keys
    ]
    monkeypatch.setattr(unfinished_uploads, "unfinished_uploads", lambda url: uploads)
    asked: list[UnfinishedUpload] = []
    with monkeypatch.context() as patch:
        patch.setattr(unfinished_uploads, "end_upload", lambda upload: asked.append(upload))
        assert end_uploads_before("s3://bucket/run", 3) == 0
        assert len(asked) == 1
    monkeypatch.setattr(unfinished_uploads, "SWEEP_S", 0.0)
    assert end_uploads_before("s3://bucket/run", 3) == 0
    assert server.came == []


def test_gc_says_which_uploads_stay(server: Uploads, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the store does not end is no removed one, and neither are unlisted ones."""
    upload = UnfinishedUpload(bucket="bucket", key=shard(1), upload_id="1", term=1)
    monkeypatch.setattr(maintenance, "end_upload", lambda upload: False)
    gone = maintenance.Leftover(path="s3://bucket/x", kind="upload", bytes=0, upload=upload)
    with pytest.raises(OSError, match="did not end the upload"):
        maintenance.remove(gone)
    said: list[str] = []
    monkeypatch.setattr(maintenance, "_listed", lambda path: {})
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert maintenance.leftovers("s3://bucket/run", warn=said.append) == []
    assert "s3://bucket/run: uploads that were cut off cannot be listed" in said[0]


@pytest.mark.parametrize("token", ["", "lent"])
def test_requests_are_signed_as_the_library_signs_them(
    server: Uploads, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    """The same request at the same second has the same signature."""
    if token:
        monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    Objects("s3://bucket").sizes("a b/ü+~")
    ((method, path, headers),) = server.came
    sent = {name.lower(): value for name, value in headers.items()}
    moment = time.strptime(sent["x-amz-date"], "%Y%m%dT%H%M%SZ")
    monkeypatch.setattr(time, "gmtime", lambda: moment)
    where, _, text = path.partition("?")
    query = unfinished_uploads._query(dict(parse_qsl(text, keep_blank_values=True)))
    ours = unfinished_uploads._signed(method, sent["host"], where, query, s3_keys(), "us-east-1")
    assert ours["Authorization"] == sent["authorization"].replace(",Signature", ", Signature")
    assert ours.get("x-amz-security-token", "") == token


class Removals:
    """A directory whose objects stand on disk, and whose uploads are those of `server`."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = CheckpointDirectory(f"file://{path}/run")
        self.term = self.directory.claim(self.directory.open(), "launch", 0, force=False)
        monkeypatch.setattr(
            removal, "end_uploads_of",
            lambda url, generation: end_uploads_of("s3://bucket/run", generation),
        )  # fmt: skip

    def put_shard(self, step: int) -> str:
        """The folder of a generation."""
        folder = self.directory.generation_path(Generation(term=self.term, step=step))
        place_of(folder).write_new(f"{folder}/shard-00000-a1.safetensors", b"bytes")
        return folder

    def trash(self, step: int) -> str:
        """A save that was given up; its folder."""
        folder = self.put_shard(step)
        self.directory.trash(Generation(term=self.term, step=step))
        return folder


def test_shards_go_also_where_uploads_may_not_be_listed(
    server: Uploads, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rank puts one late; the permission is named once, and then nothing more is asked."""
    server.refuses = lambda prefix: True
    run, said = Removals(tmp_path, monkeypatch), []
    for step in (1, 2):
        run.trash(step)
    late = run.put_shard(2)
    for step in range(3, 4 + removal.UPLOAD_TRIES):
        run.trash(step)
        said.append(run.directory.take_warning())
    assert place_of(late).names(late) == []
    (warning,) = filter(None, said)
    assert "Allow the keys s3:ListBucketMultipartUploads and s3:AbortMultipartUpload" in warning
    assert len(server.came) == removal.UPLOAD_TRIES


def test_one_whose_uploads_cannot_be_ended_keeps_no_other_waiting(
    server: Uploads, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The oldest is refused for a while; uploads of the others end, and at last its own."""
    run = Removals(tmp_path, monkeypatch)
    names = [Generation(term=run.term, step=step).name for step in range(4)]
    server.keys = [f"run/{name}/shard-00000-a1.safetensors" for name in names]
    server.refuses = lambda prefix: prefix.startswith(f"run/{names[0]}")
    for step in range(4):
        run.trash(step)
    assert server.keys == [f"run/{names[0]}/shard-00000-a1.safetensors"]
    server.refuses = lambda prefix: False
    run.trash(5)
    assert server.keys == []


def test_uploads_of_a_save_that_was_given_up_while_the_store_was_away_end_later(
    server: Uploads, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the next removal."""
    run = Removals(tmp_path, monkeypatch)
    dropped = Generation(term=run.term, step=4)
    server.keys = [f"run/{dropped.name}/shard-00000-a1.safetensors"]
    with monkeypatch.context() as patch:
        patch.setattr(Objects, "asking", no_store)
        with pytest.raises(StorageError, match="no answer"):
            run.directory.trash(dropped)
    run.trash(5)
    assert server.keys == []


@pytest.mark.slow
def test_a_real_upload_that_was_cut_off_leaves_nothing(s3: None) -> None:
    """By the next start, and by `autockpt gc`; one of a start that may live stays."""
    url, begun = "s3://bucket/cut", []
    Objects("s3://bucket").write("cut/JOB", b"{}")  # the tier of a run, not copies of one
    for term in (1, 2, 3):
        upload = Objects("s3://bucket").begin(shard(term, "cut"), 64 * 2**20)
        for _ in range(3):
            upload.write(bytes(PART_BYTES))
        begun.append(upload)
    deadline = time.monotonic() + 60
    while len(unfinished_uploads.unfinished_uploads(url)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert end_uploads_before(url, 2) == 1
    found = [one for one in maintenance.leftovers(url, newest_term=2) if one.kind == "upload"]
    assert [one.path for one in found] == [f"s3://bucket/{shard(2, 'cut')}"]
    maintenance.remove(found[0])
    assert [one.term for one in unfinished_uploads.unfinished_uploads(url)] == [3]


@pytest.mark.slow
def test_a_save_that_was_given_up_leaves_nothing_in_a_living_run(
    s3: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shards and cut uploads go with the next removal, also when the store was away then."""
    url = "s3://bucket/living"
    directory = CheckpointDirectory(url)
    term = directory.claim(directory.open(), "launch", 0, force=False)
    dropped, other = (Generation(term=term, step=step) for step in (4, 5))
    folder = directory.generation_path(dropped)
    place_of(folder).write_new(f"{folder}/shard-00000-a1.safetensors", b"bytes")
    cut = Objects("s3://bucket").begin(f"living/{dropped.name}/shard-00001-a1.safetensors", 2**26)
    for _ in range(3):
        cut.write(bytes(PART_BYTES))
    deadline = time.monotonic() + 60
    while not unfinished_uploads.unfinished_uploads(url):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with monkeypatch.context() as patch:
        patch.setattr(Objects, "asking", no_store)
        with pytest.raises(StorageError, match="no answer"):
            directory.trash(dropped)
    assert place_of(folder).names(folder)
    directory.trash(other)
    assert place_of(folder).names(folder) == []
    assert unfinished_uploads.unfinished_uploads(url) == []


@contextlib.contextmanager
def no_store(self: Objects, verb: str, name: str) -> Iterator[None]:
    """It does not answer."""
    raise StorageError(f"{name}: cannot {verb}: no answer")
    yield
