"""Azure's blob service as Azurite emulates it, with one container: `npm install -g azurite`."""

import base64
import contextlib
import hashlib
import hmac
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate

import pytest

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""That every Azurite has; no secret."""
CONTAINER = "bucket"
PATIENCE_S = 60.0


@contextlib.contextmanager
def azurite() -> Iterator[str]:
    """The address of a server of its own.  Skips where there is none."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("needs Azurite: npm install -g azurite")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence",
        "--silent", "--skipApiVersionCheck", "--disableTelemetry",
    ]  # fmt: skip
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not _makes_container(url):
            assert server.poll() is None, f"azurite ended with {server.returncode}"
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait()


def account(url: str) -> dict[str, str]:
    """The variables that name the server to autockpt."""
    return {
        "AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": url,
        "AZURE_ALLOW_HTTP": "true", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip


def _makes_container(url: str) -> bool:
    """By a request that is signed with the account's key."""
    told = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    named = "".join(f"{name}:{value}\n" for name, value in told.items())
    text = f"PUT{12 * chr(10)}{named}/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
    signed = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    headers = {
        **told, "Content-Length": "0",
        "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(signed).decode()}",
    }  # fmt: skip
    place = f"{url}/{ACCOUNT}/{CONTAINER}?restype=container"
    request = urllib.request.Request(place, method="PUT", headers=headers)
    with contextlib.suppress(ConnectionError, urllib.request.URLError):
        return bool(urllib.request.urlopen(request, timeout=PATIENCE_S).status == 201)
    return False
