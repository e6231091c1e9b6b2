"""A store that speaks the XML protocol of Google's, with generations and conditions on them.

It is made from Google's documents for the requests that the library sends; no key is checked.
Google's own emulators know another protocol.
"""

import contextlib
import hashlib
import itertools
import json
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit

BUCKET = "bucket"
STAMP = "2026-11-01T00:00:00.000Z"
MOST_KEYS = 1000


@dataclass(slots=True)
class Stored:
    """One object."""

    body: bytes
    generation: int

    @property
    def etag(self) -> str:
        """Digest of its bytes."""
        return f'"{hashlib.md5(self.body, usedforsecurity=False).hexdigest()}"'


@dataclass(slots=True)
class State:
    """A bucket: objects, uploads in parts, and the next number of a generation."""

    objects: dict[str, Stored] = field(default_factory=dict)
    uploads: dict[str, tuple[str, dict[int, bytes]]] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1700000000000001))
    lock: threading.Lock = field(default_factory=threading.Lock)


class Server(ThreadingHTTPServer):
    """On this machine."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.state = State()


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_PUT(self) -> None:
        state, key, query, body = self._asked()
        if "uploadId" in query:
            with state.lock:
                parts = state.uploads.get(query["uploadId"])
                if parts is not None:
                    parts[1][int(query["partNumber"])] = body
            found = Stored(body, 0)
            self._answer(404 if parts is None else 200, b"", {"ETag": found.etag})
        else:
            self._put(key, body)

    def do_POST(self) -> None:
        state, key, query, body = self._asked()
        if "uploads" in query:
            name = f"upload-{next(state.numbers)}"
            state.uploads[name] = (key, {})
            text = f"<Bucket>{BUCKET}</Bucket><Key>x</Key><UploadId>{name}</UploadId>"
            self._answer(200, _xml("InitiateMultipartUploadResult", text), {})
            return
        _, parts = state.uploads.pop(query["uploadId"])
        numbers = [int(at.text or 0) for at in ET.fromstring(body).iter() if "PartNumber" in at.tag]
        self._put(key, b"".join(parts[number] for number in numbers), completes=True)

    def _put(self, key: str, body: bytes, *, completes: bool = False) -> None:
        state, wanted = self._state, self.headers.get("x-goog-if-generation-match")
        with state.lock:
            there = state.objects.get(key)
            generation = 0 if there is None else there.generation
            if wanted is not None and int(wanted) != generation:
                self._answer(412, _xml("Error", "<Code>PreconditionFailed</Code>"), {})
                return
            stored = state.objects[key] = Stored(body, next(state.numbers))
        text = _xml("CompleteMultipartUploadResult", f"<ETag>{stored.etag}</ETag>")
        self._answer(200, text if completes else b"", _headers(stored))

    def do_GET(self) -> None:
        state, key, query, _ = self._asked()
        if not key:
            self._list(state, query)
            return
        stored = state.objects.get(key)
        if stored is None:
            self._answer(404, _xml("Error", "<Code>NoSuchKey</Code>"), {})
            return
        headers, body, code = _headers(stored), stored.body, 200
        if span := self.headers.get("Range"):
            first, last = (int(at) for at in span.removeprefix("bytes=").split("-"))
            last = min(last, len(body) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
            code, body = (206, body[first : last + 1]) if first < len(body) else (416, b"")
        self._answer(code, body, headers)

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        state, key, query, _ = self._asked()
        if "uploadId" in query:
            there: object = state.uploads.pop(query["uploadId"], None)
        else:
            there = state.objects.pop(key, None)
        text = _xml("Error", "<Code>NoSuchKey</Code>") if there is None else b""
        self._answer(404 if there is None else 204, text, {})

    def _list(self, state: State, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        behind = query.get("continuation-token", "")
        found: list[str] = []
        last = ""
        with state.lock:
            objects = {k: v for k, v in sorted(state.objects.items()) if k.startswith(prefix)}
        for key, stored in objects.items():
            rest = key[len(prefix) :]
            folder = prefix + rest[: rest.index(delimiter) + 1] if delimiter in rest[:-1] else ""
            if not delimiter or not folder:
                text = (
                    f"<Contents><Key>{key}</Key><LastModified>{STAMP}</LastModified>"
                    f"<ETag>{stored.etag}</ETag><Size>{len(stored.body)}</Size></Contents>"
                )
            else:
                text = f"<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>"
            if text in found[-1:] or (behind and max(key, folder) <= behind):
                continue
            if len(found) == MOST_KEYS:
                found.append(f"<NextContinuationToken>{last}</NextContinuationToken>")
                break
            found.append(text)
            last = folder + "\x7f" if folder and delimiter else key
        self._answer(200, _xml("ListBucketResult", "".join(found)), {})

    @property
    def _state(self) -> State:
        assert isinstance(self.server, Server)
        return self.server.state

    def _asked(self) -> tuple[State, str, dict[str, str], bytes]:
        """(the bucket, name of the object, query, body)."""
        parts = urlsplit(self.path)
        key = unquote(parts.path).removeprefix(f"/{BUCKET}").lstrip("/")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return self._state, key, dict(parse_qsl(parts.query, keep_blank_values=True)), body

    def _answer(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        if code != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def _headers(stored: Stored) -> dict[str, str]:
    return {
        "ETag": stored.etag, "x-goog-generation": str(stored.generation),
        "Last-Modified": formatdate(1793491200, usegmt=True),
    }  # fmt: skip


def _xml(name: str, text: str) -> bytes:
    return f'<?xml version="1.0"?><{name}>{text}</{name}>'.encode()


@contextlib.contextmanager
def google() -> Iterator[str]:
    """The address of a server of its own, with one bucket."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(60)
        server.server_close()


def account(url: str) -> dict[str, str]:
    """The variables that name the server to autockpt."""
    key = {
        "gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": "",
        "private_key_id": "",
    }  # fmt: skip
    return {
        "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key), "GOOGLE_ALLOW_HTTP": "true",
        "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
