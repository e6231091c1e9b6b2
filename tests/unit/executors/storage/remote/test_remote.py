"""Remote copies keep their contract in memory, in a mounted directory and on S3's protocol."""

import itertools
import random
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from autockpt.executors.storage.places import object_store as objects_module
from autockpt.executors.storage.remote import Objects, RemoteCopies
from autockpt.values.errors import AutockptError, ConfigError, StorageError
from tests.contracts.remote_contract import Asked, RemoteContract, Trained
from tests.support import azurite, google

_places = itertools.count()


class TestMemory(RemoteContract):
    """The reference: nothing is between us and the store."""

    @pytest.fixture
    def fresh(self, tmp_path: Path) -> Callable[[], Objects]:
        """A store each."""
        return lambda: Objects("memory:///copies", store=MemoryStore())


class TestMountedDirectory(RemoteContract):
    """As `file:///...` names it; the name has a blank."""

    stride = 3

    @pytest.fixture
    def fresh(self, tmp_path: Path) -> Callable[[], Objects]:
        """A directory each, which does not exist yet."""
        return lambda: Objects(f"file://{tmp_path}/a store/{next(_places)}/")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server that speaks S3's protocol, on this machine, with one bucket."""
    server = pytest.importorskip(
        "moto.server", reason="needs an S3 server: pip install 'moto[s3,server]'"
    ).ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"), timeout=20)
    yield url
    server.stop()


@pytest.fixture
def s3(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named as users name it: in the environment."""
    account(endpoint, monkeypatch)


def account(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An account on a server."""
    values = {
        "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
class TestS3(RemoteContract):
    """Over HTTP, with multipart uploads and conditional puts of the real protocol."""

    stride = 4

    @pytest.fixture
    def fresh(self, s3: None) -> Callable[[], Objects]:
        """A prefix each."""
        return lambda: Objects(f"s3://bucket/team/{next(_places)}")

    @pytest.fixture(autouse=True)
    def small_parts(self) -> None:
        """S3 takes no parts below 5 MiB."""

    @pytest.fixture(autouse=True)
    def no_leak(self) -> None:
        """Connections stay open for the next request."""

    def test_a_large_file_is_put_in_parts(
        self, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of the least size that S3 takes; only the last one makes it an object."""
        monkeypatch.setattr(objects_module, "PART_BYTES", 5 * 2**20)
        size = 11 * 2**20 + 7
        (tmp_path / "source").write_bytes(random.Random(0).randbytes(size))
        seen: list[dict[str, int]] = []
        gate = Asked(lambda: seen.append(objects.sizes("a")), 2)
        objects.upload(str(tmp_path / "source"), "a/b", size, gate)
        assert seen == [{}]
        assert objects.sizes("a") == {"b": size}
        objects.download("a/b", str(tmp_path / "target"), size, lambda n: None)
        assert (tmp_path / "target").read_bytes() == (tmp_path / "source").read_bytes()

    def test_a_bucket_that_is_not_there_is_a_storage_error(
        self, s3: None, run: Trained, tmp_path: Path
    ) -> None:
        """Nothing was deleted and nothing is absent: the name is wrong."""
        copies = RemoteCopies(Objects("s3://no-such-bucket/team"))
        for ask in (
            lambda: copies.push(run.directory, run.save(1)),
            copies.commits,
            lambda: copies.missing(str(tmp_path / "there")),
            lambda: copies.pull(str(tmp_path / "there")),
            lambda: copies.retire(1),
        ):
            with pytest.raises(StorageError, match=r"s3://no-such-bucket/team/.*cannot "):
                ask()  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def azure() -> Iterator[str]:
    """Azure's protocol, on this machine."""
    with azurite.azurite() as url:
        yield url


@pytest.mark.slow
class TestAzure(RemoteContract):
    """Over HTTP, with blocks and conditional puts of the real protocol."""

    stride = 8

    @pytest.fixture
    def fresh(self, azure: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Objects]:
        """A prefix each."""
        for name, value in azurite.account(azure).items():
            monkeypatch.setenv(name, value)
        return lambda: Objects(f"az://{azurite.CONTAINER}/team/{next(_places)}")

    @pytest.fixture(autouse=True)
    def no_leak(self) -> None:
        """Connections stay open for the next request."""


@pytest.fixture(scope="module")
def googles() -> Iterator[str]:
    """Google's protocol, on this machine."""
    with google.google() as url:
        yield url


@pytest.mark.slow
class TestGoogle(RemoteContract):
    """Over HTTP, with generations and conditions on them."""

    stride = 4

    @pytest.fixture
    def fresh(self, googles: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Objects]:
        """A prefix each."""
        for name, value in google.account(googles).items():
            monkeypatch.setenv(name, value)
        return lambda: Objects(f"gs://{google.BUCKET}/team/{next(_places)}")

    @pytest.fixture(autouse=True)
    def no_leak(self) -> None:
        """Connections stay open for the next request."""


# --- URLs


@pytest.mark.parametrize("url", ["", "copies", "/tmp/copies", "s3://", "s3:bucket", "file:///"])
def test_what_is_no_url_is_refused_with_examples(url: str) -> None:
    """A path, a name, half a URL."""
    with pytest.raises(ConfigError, match=r"no object store; expected s3://BUCKET/PREFIX, gs://"):
        Objects(url)


@pytest.mark.parametrize("url", ["ftp://host/copies", "ssh://host/copies", "memory:///copies"])
def test_an_unknown_scheme_is_refused_with_examples(url: str) -> None:
    """Also one whose objects end with the process."""
    with pytest.raises(ConfigError, match=r"expected s3://BUCKET/PREFIX, gs://"):
        Objects(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA123:hush@bucket/prefix",
        "s3://AKIA123:hu/sh@bucket/prefix",
        "s3://bucket/prefix?aws_secret_access_key=hush",
        "AKIA123:hush@bucket/prefix",
        "bucket/prefix?key=hush",
        "ftp://AKIA123:hush@host/prefix",
    ],
)
def test_keys_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    """Neither in the message nor in what caused it; it says where keys belong."""
    with pytest.raises(ConfigError, match=r"environment \(AWS_ACCESS_KEY_ID") as raised:
        Objects(url)
    error: BaseException | None = raised.value
    while error is not None:
        assert not any(part in str(error) for part in ("AKIA", "hu", "sh@"))
        error = error.__cause__ or error.__context__


def test_an_address_without_encryption_needs_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would say "builder error"."""
    account("http://127.0.0.1:1", monkeypatch)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "false")
    with pytest.raises(ConfigError, match=r"AWS_ENDPOINT_URL: .* AWS_ALLOW_HTTP=true"):
        Objects("s3://bucket/team")


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "minio"])
def test_an_address_of_s3_concerns_no_other_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    """A machine may have the variables of several stores."""
    account(endpoint, monkeypatch)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "false")
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    Objects("gs://bucket/team")
    Objects(f"file://{tmp_path}/team")


def test_a_server_that_does_not_answer_is_a_storage_error_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked several times; the message names server and object."""
    account("http://127.0.0.1:1", monkeypatch)
    copies = RemoteCopies(Objects("s3://bucket/team"))
    begun = time.monotonic()
    with pytest.raises(StorageError, match=r"s3://bucket/team/.*127\.0\.0\.1:1.* retries") as told:
        copies.missing(str(tmp_path / "there"))
    assert time.monotonic() - begun < 60
    assert "\n" not in str(told.value)
    assert isinstance(told.value, AutockptError)
