"""Another door of the S3 server of this process: in a network namespace, and it counts."""

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from benchmarks.namespaces import Node
from tests.jobs.nodes.trainer import enter


class Door:
    """Serves what moto has on an address of a node, until it is ended."""

    def __init__(self, at: Node) -> None:
        """Raises OSError where the namespace cannot be entered."""
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.WARNING)  # else a line for each request
        self._application = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self.read_bytes = Counter[str]()
        """Bytes of answers to GET, by path of the object."""
        self.held_host = ""
        """Shards that this host reads are not answered until it is another one."""
        self.held = threading.Event()
        """A request of that host waits."""
        listening = _listening(at)
        host, port = listening.getsockname()
        self.url = f"http://{host}:{port}"
        self._server = make_server(host, port, self._answer, threaded=True, fd=listening.detach())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def shards_read_bytes(self, generation: str) -> int:
        """Of the shards of a checkpoint, so far."""
        with self._lock:
            read = dict(self.read_bytes)
        return sum(nbytes for key, nbytes in read.items() if f"/{generation}/shard-" in key)

    def _answer(self, asked: dict[str, Any], start: Any) -> Iterable[bytes]:
        is_read = asked["REQUEST_METHOD"] == "GET"
        while (
            is_read and "/shard-" in asked["PATH_INFO"] and asked["REMOTE_ADDR"] == self.held_host
        ):
            self.held.set()
            time.sleep(0.05)
        body = b"".join(self._application(asked, start))
        if is_read:
            with self._lock:
                self.read_bytes[asked["PATH_INFO"]] += len(body)
        return [body]

    def end(self) -> None:
        """Serves no more."""
        self._server.shutdown()
        self._thread.join(60)
        self._server.server_close()


def _listening(at: Node) -> socket.socket:
    """A socket is of the namespace in which it was made, and a thread may enter one alone."""
    found: list[socket.socket | BaseException] = []

    def listen() -> None:
        try:
            enter(at.namespace)
            found.append(socket.create_server((at.host, 0), backlog=128))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join(60)
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]
