"""A fault at every request to an object store: refused, or carried out with the answer lost.

A request whose answer is lost has taken effect.  One that is late takes effect after the next start
of the run.  The store is a directory behind the same library.
"""

import contextlib
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from autockpt.executors.storage.places import store
from autockpt.executors.storage.places.object_store import Objects
from autockpt.values.errors import AutockptError, StorageError
from autockpt.values.generation import Generation
from tests.campaigns.framework import require
from tests.campaigns.job import (
    ACTS,
    DURABLE,
    JOBS,
    PATIENCE_S,
    SHAPES,
    Job,
    Shape,
    require_recovery,
)
from tests.contracts.faults import open_descriptors

BUCKET = "s3://bucket"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to a request."""

    request: int
    """Its number, from 0."""
    kind: str
    """refused; lost: it takes effect, and its answer is lost; late: an error, and a put takes
    effect after the next start."""
    is_sticky: bool
    """So do all later ones."""

    def hits(self, number: int) -> bool:
        """Whether it happens to a request of that number."""
        return number >= self.request if self.is_sticky else number == self.request


class FaultyObjects(Objects):
    """Counts requests, and has one fault or none."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.fault: Fault | None = None
        self.requests = 0
        self._late: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def land(self) -> None:
        """What is late arrives."""
        late, self._late = self._late, []
        for put in late:
            with contextlib.suppress(AutockptError):
                put()

    def create(self, name: str, body: bytes) -> bool:
        """See `Objects`."""
        self._delay(name, lambda: super(FaultyObjects, self).create(name, body))
        return super().create(name, body)

    def write(self, name: str, body: bytes) -> None:
        """See `Objects`."""
        self._delay(name, lambda: super(FaultyObjects, self).write(name, body))
        super().write(name, body)

    def replace(self, name: str, old: bytes, new: bytes) -> bool:
        """See `Objects`."""
        self._delay(name, lambda: super(FaultyObjects, self).replace(name, old, new))
        return super().replace(name, old, new)

    def _delay(self, name: str, put: Callable[[], object]) -> None:
        """Raises StorageError where the next request is late."""
        fault = self.fault
        if fault is not None and fault.kind == "late" and fault.hits(self.requests):
            self.requests += 1
            self._late.append(put)
            raise StorageError(f"{self.url}/{name}: cannot write: no answer")

    @contextlib.contextmanager
    def asking(self, verb: str, name: str) -> Iterator[None]:
        """See `Objects`."""
        with self._lock:
            number, self.requests = self.requests, self.requests + 1
        hit = self.fault is not None and self.fault.hits(number)
        error = StorageError(f"{self.url}/{name}: cannot {verb}: 503 of request {number}")
        if hit and self.fault is not None and self.fault.kind != "lost":
            raise error
        with super().asking(verb, name):
            yield
        if hit:
            raise error


class StoreEverywhere:
    """Every (shape, act, request, refused, answer lost or late, one-shot or sticky), mixed."""

    claim = "an object store that fails at any request, also behind its back, loses nothing durable"

    def __init__(self, scratch: Path) -> None:
        self._root = scratch / "objects"
        self._objects = FaultyObjects(f"file://{self._root}")
        self._patches = contextlib.ExitStack()
        self._patches.enter_context(patch.object(store, "_bucket", lambda *_: self._objects))
        self._patches.enter_context(patch.object(store, "PAUSES_S", (0.0, 0.0)))
        self._newest = {shape: self._template(shape) for shape in SHAPES}
        self._plan = [
            (shape, act, Fault(request=request, kind=kind, is_sticky=sticky))
            for shape in SHAPES
            for act in ACTS
            for request in range(self._requests(shape, act))
            for kind in ("refused", "lost", "late")
            for sticky in (False, True)
        ]
        self.distinct: int | None = len(self._plan)
        random.Random(0).shuffle(self._plan)

    def _template(self, shape: Shape) -> str:
        """The name of a run with three checkpoints, which each case copies."""
        name = f"template-{JOBS.index(shape)}"
        job = Job(path=f"{BUCKET}/{name}", shape=shape)
        job.start()
        for step in (1, 2, 3):
            generation = Generation(term=1, step=step)
            job.save(generation, Generation(term=1, step=step - 1) if step > 1 else None)
            require(job.scrub(generation), f"{generation} cannot be read back")
        return name

    def _fresh(self, shape: Shape) -> Job:
        """A copy of it, held by term 1."""
        shutil.rmtree(self._root / "case", ignore_errors=True)
        shutil.copytree(self._root / self._newest[shape], self._root / "case")
        job = Job(path=f"{BUCKET}/case", shape=shape, term=1)
        job.run_id = job.directory.open()
        return job

    def _requests(self, shape: Shape, act: str) -> int:
        """How many requests an act makes."""
        job, before = self._fresh(shape), self._objects.requests
        ACTS[act](job)
        return self._objects.requests - before

    def run(self, number: int, rng: random.Random) -> str:
        """One of the plan."""
        shape, act, fault = self._plan[number % len(self._plan)]
        job, promised = self._fresh(shape), [DURABLE]
        job.promise = promised.append
        what, outcome = f"{act} of {shape}, {fault}", "done"
        self._objects.requests, self._objects.fault = 0, fault
        before = open_descriptors()
        try:
            ACTS[act](job)
        except AutockptError as error:
            named = any(url in str(error) for url in (BUCKET, self._objects.url))
            require(named, f"{what}: the error does not name the object: {error}")
            outcome = "refused"
        except OSError as error:
            raise AssertionError(f"{what}: a bare {error!r}") from error
        finally:
            self._objects.fault = None
        # The library's threads close the file of an upload that was given up a moment later.
        deadline = time.monotonic() + PATIENCE_S
        while open_descriptors() > before:
            require(time.monotonic() < deadline, f"{what}: descriptors left open")
            time.sleep(0.01)
        try:
            require_recovery(job, max(promised), late=self._objects.land)
        except Exception as error:
            raise AssertionError(f"{what}, then: {error!r}") from error
        return outcome

    def close(self) -> None:
        """The store is the real one again."""
        self._patches.close()
