"""The same transfers through TLS: encrypted, both ends with a certificate, no sendfile."""

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from autockpt.executors.transfer import greeting
from autockpt.executors.transfer.events import (
    ConnectionRefused,
    Fetched,
    ReplicaReceived,
    ReplicaSealed,
    TransferFailed,
)
from autockpt.executors.transfer.stream import Tls
from tests.executors.transfer.conftest import Make, Start
from tests.executors.transfer.ends import CHUNK, PATIENCE_S

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate")


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """Contexts that trust one certificate, which all nodes have."""
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=keeper", "-keyout", str(key), "-out",
         str(certificate)],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    return Tls(
        called=_context(ssl.PROTOCOL_TLS_SERVER, key, certificate),
        caller=_context(ssl.PROTOCOL_TLS_CLIENT, key, certificate),
    )


def _context(protocol: int, key: Path, certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(certificate)
    return context


@pytest.mark.parametrize("streams", [1, 3])
def test_an_image_goes_and_comes_back_encrypted(
    start: Start, image: Make, tls: Tls, streams: int
) -> None:
    """Push and fetch, to the bit."""
    zero, one, made = start(0, tls=tls), start(1, tls=tls), image(20 * CHUNK + 9).seal()
    zero.pool.push(1, one.address, made.source, deadline_s=PATIENCE_S, streams=streams)
    one.told(ReplicaReceived)
    zero.told(ReplicaSealed)
    assert one.received == made.view
    zero.lent[made.index.root] = made
    one.pool.fetch(
        0, zero.address, made.subject, made.index.root, one.destination(made.subject),
        deadline_s=PATIENCE_S, streams=streams,
    )  # fmt: skip
    one.told(Fetched)
    assert one.received == made.view


def test_nobody_without_a_certificate_takes_part(
    start: Start, image: Make, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain caller waits for our handshake while that of TLS waits for it."""
    monkeypatch.setattr(greeting, "HANDSHAKE_S", 0.3)
    plain, one, made = start(0), start(1, tls=tls), image(CHUNK).seal()
    plain.pool.push(1, one.address, made.source, deadline_s=PATIENCE_S)
    assert plain.told(TransferFailed).fault in ("protocol", "broken", "silent")
    one.told(ConnectionRefused)


def test_an_encrypted_source_is_free_after_revoke(start: Start, image: Make, tls: Tls) -> None:
    """Encrypting reads the slot in Python; revoke waits for that, too."""
    zero, one, made = start(0, tls=tls), start(1, tls=tls), image(2**25).seal()
    transfer = zero.pool.push(1, one.address, made.source, deadline_s=PATIENCE_S)
    made.source.revoke("needed")
    assert transfer.lease._inside == 0
    assert zero.told(TransferFailed).fault == "aborted"
