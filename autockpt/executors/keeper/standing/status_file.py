"""The status of a run while it lasts: status.json, and Prometheus text from a small endpoint.

Each has a thread of its own: the run directory may hang, and a scraper may be slow.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from autockpt import new_files
from autockpt.values.generation import Generation
from autockpt.values.record import to_json
from autockpt.values.status import RunStatus

if TYPE_CHECKING:
    import http.server

METRICS_PORT = "AUTOCKPT_METRICS_PORT"
CLOSE_S = 2.0
"""A keeper that leaves waits no longer for a run directory that hangs."""


class StatusFile:
    """Replaces the file by the newest status; what comes while a write hangs is overtaken."""

    def __init__(self, run_directory: str) -> None:
        self._path = os.path.join(run_directory, "status.json")
        self._newest: queue.Queue[RunStatus] = queue.Queue(maxsize=1)
        self._thread: threading.Thread | None = None

    def write(self, status: RunStatus) -> None:
        """Never waits and never raises."""
        with contextlib.suppress(queue.Empty):
            self._newest.get_nowait()
            self._newest.task_done()
        with contextlib.suppress(queue.Full):
            self._newest.put_nowait(status)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="autockpt-status", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Waits a moment for the last one."""
        deadline_s = time.monotonic() + CLOSE_S
        while self._newest.unfinished_tasks and time.monotonic() < deadline_s:
            time.sleep(0.01)

    def _serve(self) -> None:
        temporary = f"{self._path}.{os.getpid()}.tmp"
        while True:
            text = to_json(self._newest.get(), indent=2) + "\n"
            with contextlib.suppress(OSError):
                with open(temporary, "w", encoding="utf-8", opener=new_files.readable) as file:
                    file.write(text)
                os.replace(temporary, self._path)
            self._newest.task_done()


def exposition(status: RunStatus, run: str, *, written_s: float | None = None) -> str:
    """Return the status as Prometheus text.  `written_s`: Unix time, None for now."""
    durable = Generation.from_text(status.last_durable).step if status.last_durable else None
    at_risk = None if status.last_step is None else max(0, status.last_step - (durable or 0))
    failing = any(tier.tier == "disk" for tier in status.degraded)
    written_s = time.time() if written_s is None else written_s
    label = run.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    lines = []
    for name, text, value in (
        ("protected", "1 if the training state is checkpointed.", int(status.protected)),
        ("running", "1 while the run trains.", int(status.state == "running")),
        ("last_step", "Newest step that was trained.", status.last_step),
        ("durable_step", "Newest step that is durable on disk.", durable),
        ("at_risk_steps", "Steps since the newest durable checkpoint.", at_risk),
        ("storage_failing", "1 if checkpoints do not reach the disk now.", int(failing)),
        ("restarts", "Restarts by autockpt run.", status.restarts),
        ("status_timestamp_seconds", "Unix time of this status.", round(written_s, 3)),
    ):
        if value is not None:
            lines += [f"# HELP autockpt_{name} {text}", f"# TYPE autockpt_{name} gauge",
                      f'autockpt_{name}{{run="{label}"}} {value}']  # fmt: skip
    return "\n".join(lines) + "\n"


def is_port(text: str) -> bool:
    """Whether it can be served; 0 is any free port."""
    return text.isdecimal() and int(text) < 2**16


class StatusEndpoint:
    """Serves the newest status as Prometheus text on the loopback, on a thread of its own.

    Off unless `AUTOCKPT_METRICS_PORT` names a port.  A port that is taken is logged, and the
    training goes on without the endpoint.
    """

    def __init__(self, run: str, port: str, log: Callable[[str], None]) -> None:
        self._run = run
        self._newest: tuple[RunStatus, float] | None = None
        self._server: http.server.HTTPServer | None = None
        if not port:
            return
        try:
            self._server = self._listen(int(port))
        except (OSError, ValueError, OverflowError) as error:
            log(f"{METRICS_PORT}={port}: no metrics are served: {error}")

    @property
    def port(self) -> int | None:
        """The port that is served; None: none."""
        return None if self._server is None else self._server.server_port

    def show(self, status: RunStatus) -> None:
        """Serve this one from now on."""
        self._newest = status, time.time()

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _listen(self, port: int) -> "http.server.HTTPServer":
        import http.server

        endpoint = self

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = 5.0

            def do_GET(self) -> None:
                body = endpoint._text().encode()
                self.send_response(200 if self.path in ("/", "/metrics") else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Log nothing: a scrape is no event."""

        server = http.server.HTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=server.serve_forever, name="autockpt-metrics", daemon=True).start()
        return server

    def _text(self) -> str:
        newest = self._newest
        return "" if newest is None else exposition(newest[0], self._run, written_s=newest[1])
