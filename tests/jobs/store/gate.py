"""A door in front of an S3 server: it can be shut, answer with errors, or know one key only."""

import http.client
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class Gate(ThreadingHTTPServer):
    """Hands requests on to a server on this machine, as long as it is told so."""

    daemon_threads = True

    def __init__(self, server: str) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.behind = urlsplit(server).netloc
        self.code = ""
        """The error that every request gets; "" for none."""
        self.is_shut = False
        """Every connection is closed without an answer."""
        self.key = ""
        """The only key that has not expired; "": every key is good."""
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        """The endpoint that jobs are given."""
        return f"http://127.0.0.1:{self.server_port}"

    def refusal(self, authorization: str) -> str:
        """The error for a request; "": it is handed on."""
        used = re.search(r"Credential=(\w+)", authorization)
        known = not self.key or (used is not None and used[1] == self.key)
        return self.code or ("" if known else "ExpiredToken")

    def end(self) -> None:
        """Serves no more."""
        self.shutdown()
        self._thread.join(60)
        self.server_close()


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Hands it on with its body, or refuses it."""
        gate = self.server
        assert isinstance(gate, Gate)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if gate.is_shut:
            self.close_connection = True
            return
        if code := gate.refusal(self.headers.get("Authorization") or ""):
            status = 503 if code in ("SlowDown", "ServiceUnavailable") else 400
            self._answer(status, {}, f"<Error><Code>{code}</Code></Error>".encode())
            return
        behind = http.client.HTTPConnection(gate.behind, timeout=60)
        try:
            behind.request(self.command, self.path, body, dict(self.headers))
            answer = behind.getresponse()
            self._answer(answer.status, dict(answer.headers), answer.read())
        finally:
            behind.close()

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        length = headers.get("Content-Length", len(body)) if self.command == "HEAD" else len(body)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""
