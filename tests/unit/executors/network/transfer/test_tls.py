"""The same transfers through TLS: encrypted, both ends with a certificate, no sendfile."""

import shutil
import ssl
import subprocess
import threading
from pathlib import Path

import pytest

from autockpt.executors.network.transfer import greeting
from autockpt.executors.network.transfer.events import (
    ConnectionRefused,
    Fetched,
    Served,
    TransferFailed,
)
from autockpt.executors.network.transfer.stream import Tls
from tests.unit.executors.network.transfer.conftest import Make, Start
from tests.unit.executors.network.transfer.ends import CHUNK, PATIENCE_S

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
def test_an_image_is_fetched_encrypted(start: Start, image: Make, tls: Tls, streams: int) -> None:
    """To the bit."""
    lender, lost, made = start(0, tls=tls), start(1, tls=tls), image(20 * CHUNK + 9)
    lender.lend(made)
    lost.fetch(lender, made, streams=streams)
    lost.told(Fetched)
    lender.told(Served)
    assert lost.received == made.view


def test_nobody_without_a_certificate_takes_part(
    start: Start, image: Make, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain caller waits for our handshake while that of TLS waits for it."""
    monkeypatch.setattr(greeting, "HANDSHAKE_S", 0.3)
    plain, lender, made = start(0), start(1, tls=tls), image(CHUNK)
    lender.lend(made)
    plain.fetch(lender, made)
    assert plain.told(TransferFailed).fault in ("protocol", "broken", "silent")
    lender.told(ConnectionRefused)


def test_an_encrypted_source_is_free_after_revoke(start: Start, image: Make, tls: Tls) -> None:
    """Encrypting reads the slot in Python; revoke waits for that, too."""
    lender, lost, made = start(0, tls=tls), start(1, tls=tls), image(2**26)
    lender.lend(made)
    begun = threading.Event()
    lost.placing = lambda number: begun.set()
    lost.fetch(lender, made)
    assert begun.wait(PATIENCE_S)
    leases = list(made.source._leases)
    made.source.revoke("needed")
    assert not any(lease._inside for lease in leases)
    assert lender.told(TransferFailed).fault == "aborted"
