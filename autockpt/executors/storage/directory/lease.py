"""terms/: the claim of a checkpoint directory, which fences every earlier start.

One file per term, which is never replaced.  The holder shows by its pid that it lives, or by its
heartbeat where the pid cannot be seen.
"""

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable

from autockpt.executors.storage.directory.claims import (
    TermFile,
    is_alive,
    is_visible,
    own_claim,
    start_of,
)
from autockpt.executors.storage.directory.identity import RunIdentity
from autockpt.executors.storage.directory.records import (
    generations_in,
    is_there,
    names_in,
    publish,
    read_small,
    storage_error,
)
from autockpt.executors.storage.places.place import Place
from autockpt.executors.storage.places.store import read_patiently
from autockpt.values.errors import (
    ConfigError,
    CorruptCheckpointError,
    DirectoryBusyError,
    GuardError,
    StorageError,
)
from autockpt.values.record import from_json, to_json

TERM = re.compile(r"t-\d{6}")
"""Name of the record of a term."""


class Lease:
    """Claims terms, and says whether a claim still holds."""

    def __init__(self, path: str, place: Place, identity: RunIdentity) -> None:
        self.path = path
        self._place = place
        self._identity = identity
        self._claim: TermFile | None = None
        """The claim that this process made, or found when it went on with a running term."""
        self._decision = b""
        """The decision of that term as it was written."""

    def highest_term(self) -> TermFile | None:
        """The newest claim, or None; of a damaged one all but its number is unknown.

        Raises StorageError.
        """
        names = sorted(n for n in names_in(os.path.join(self.path, "terms")) if TERM.fullmatch(n))
        if not names:
            return None
        path = os.path.join(self.path, "terms", names[-1])
        term = int(names[-1][2:])
        with storage_error("read", path), contextlib.suppress(ConfigError, CorruptCheckpointError):
            found = from_json(TermFile, read_small(path), where=path)
            if found.term == term:
                return found
        return TermFile(
            term=term, run_id="", launch_id="?", restart_round=0, host="?", boot_id="", pid=0,
            pid_start=0, nonce="",
        )  # fmt: skip

    def claim(
        self,
        run_id: str,
        launch_id: str,
        restart_round: int,
        *,
        force: bool,
        after: int = 0,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> int:
        """Claims the next term; its number, which is greater than `after`.

        It is also greater than that of each generation: claims may have been deleted.
        The same launch takes over at once; a foreign one only when its holder is dead (`force`
        states that it is known to be).  `is_wanted` is asked when the claim only has to be linked.
        Raises DirectoryBusyError naming the holder, GuardError when it is not wanted any more,
        StorageError.
        """
        for _ in range(100):
            holder = self.highest_term()
            if holder is not None and not force and holder.launch_id != launch_id:
                self.require_dead(holder)
            written = max((g.term for g in generations_in(self.path)), default=0)
            term = max(holder.term if holder else 0, after, written) + 1
            mine = own_claim(term, run_id, launch_id, restart_round)
            path = os.path.join(self.path, "terms", f"t-{term:06d}")
            with storage_error("look for", os.path.dirname(path)):
                doubtful = self._place.is_store or self._place.lacks_folder(os.path.dirname(path))
            if doubtful and self._identity.run is not None:
                self._identity.make_again()
            with storage_error("claim", path):
                if publish(path, to_json(mine).encode(), replace=False, is_wanted=is_wanted):
                    self._claim, self._decision = mine, b""
                    return term
        raise DirectoryBusyError(f"{self.path}: lost 100 races for the lease; try again")

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats."""
        return self._place.heartbeat_s

    @property
    def claimed_term(self) -> int:
        """Of the claim that this process made last, or went on with; 0: of none."""
        return 0 if self._claim is None else self._claim.term

    def holds(self, term: int) -> bool:
        """True while `term` is the newest claim, and that of the launch that made it."""
        newest = self.highest_term()
        return newest is not None and newest.term == term and not self._is_foreign(newest)

    def _is_foreign(self, claim: TermFile) -> bool:
        """Another start has taken the same number, in a directory that was made again."""
        mine = self._claim
        known = mine is not None and mine.term == claim.term and bool(claim.launch_id != "?")
        return known and mine is not None and start_of(mine) != start_of(claim)

    def go_on(self, term: int, run_id: str, launch_id: str, restart_round: int) -> None:
        """A new keeper of a running term: the claim may be gone with the directory's contents.

        Raises GuardError when a newer term exists, StorageError.
        """
        newest = self.highest_term()
        if newest is not None and newest.term == term and newest.launch_id == launch_id:
            self._claim = newest
            return
        if newest is not None and newest.term >= term:
            raise self._fenced(term)
        self._claim = own_claim(term, run_id, launch_id, restart_round)
        self._decision = b""  # the other keepers know it, and each COMMIT says it
        self.renew(term)

    def renew(self, term: int) -> bool:
        """Makes the directory again where its claim is gone; True when it had to be.

        A claim that is missing is not a newer one: the directory was emptied, unmounted, or made
        again.  Raises GuardError when a newer term exists, StorageError when it cannot be used.
        """
        if not self._is_claim_missing(term):
            return False
        mine = self._claim
        if mine is None or mine.term != term or self._identity.run is None:
            raise self.gone(term, "and this process did not make it")
        self._identity.make_again()
        path = os.path.join(self.path, "decisions", f"t-{term:06d}")
        with storage_error("write", path):
            if self._decision:
                publish(path, self._decision, replace=True)
        path = os.path.join(self.path, "terms", f"t-{term:06d}")
        with storage_error("claim", path):
            publish(path, to_json(mine).encode(), replace=False)
        if self._is_claim_missing(term):
            raise self.gone(term, "also after it was made again")
        return True

    def _is_claim_missing(self, term: int) -> bool:
        """Raises GuardError when a newer one, or another start's, is there; StorageError."""
        newest = self.highest_term()
        if newest is not None and (newest.term > term or self._is_foreign(newest)):
            raise self._fenced(term)
        return newest is None or newest.term < term

    def require_term(self, term: int) -> None:
        """Raises GuardError when a newer term exists, StorageError when the claim is gone."""
        if self._is_claim_missing(term):
            raise self.gone(term, "so nothing is committed there")

    def remember_decision(self, text: bytes) -> None:
        """Keep the decision of the claimed term, to write it again with a lost claim."""
        self._decision = text

    def _fenced(self, term: int) -> GuardError:
        return GuardError(f"{self.path}: term {term} is fenced by a newer incarnation")

    def gone(self, term: int, what: str) -> StorageError:
        """The error of a claim that is gone, without a newer one."""
        return StorageError(
            f"{self.path}: emptied, unmounted or made again: the claim of term {term} is gone, "
            f"{what}"
        )

    def release(self, term: int) -> None:
        """The holder is done though its process lives on: the next run may claim at once."""
        with contextlib.suppress(OSError):
            self._place.write(self._release_mark(term), b"")

    def _release_mark(self, term: int) -> str:
        return os.path.join(self.path, "terms", f"t-{term:06d}.left")

    def heartbeat(self, term: int) -> None:
        """Shows holders elsewhere that we are alive."""
        path = os.path.join(self.path, "terms", "heartbeat")
        with contextlib.suppress(OSError):
            self._place.write(path, f"{term} {secrets.token_hex(4)}\n".encode())

    def require_unheld(self) -> None:
        """Raises DirectoryBusyError naming the live run that holds the directory."""
        holder = self.highest_term()
        if holder is not None:
            self.require_dead(holder)

    def is_held_elsewhere(self, within_s: float) -> bool:
        """Whether a run whose processes are not visible here shows within this time that it lives.

        Raises StorageError.
        """
        holder = self.highest_term()
        if holder is None or is_visible(holder):
            return False
        with storage_error("look for", self.path):
            if is_there(self._release_mark(holder.term)):
                return False
        return self._beats(within_s)

    def require_dead(self, holder: TermFile) -> None:
        """Raises DirectoryBusyError while the process of a claim lives, StorageError."""
        left = self._release_mark(holder.term)
        with storage_error("look for", left):
            if is_there(left):
                return
        if not (is_alive(holder) if is_visible(holder) else self._beats()):
            return
        raise DirectoryBusyError(
            f"{self.path}: owned by another live run (launch {holder.launch_id}, keeper pid "
            f"{holder.pid} on {holder.host}, term {holder.term}); stop that run first, or use "
            "another --run-dir"
        )

    def _beats(self, within_s: float | None = None) -> bool:
        """Whether the heartbeat changes within the patience of the storage, or `within_s`.

        Storage that cannot be read says neither.  Raises StorageError.
        """
        path = os.path.join(self.path, "terms", "heartbeat")
        with storage_error("read", path):
            before = read_patiently(path, self._heartbeat_text)
            patience_s = self._place.patience_s if within_s is None else within_s
            deadline = time.monotonic() + patience_s
            while True:
                time.sleep(self._place.heartbeat_s / 10)
                is_over = time.monotonic() >= deadline
                try:
                    now = self._heartbeat_text()
                except OSError:
                    if not is_over:
                        continue
                    now = read_patiently(path, self._heartbeat_text)
                if now != before or is_over:
                    return now != before

    def _heartbeat_text(self) -> bytes:
        """Of the holder; none where none was left.  Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            return read_small(os.path.join(self.path, "terms", "heartbeat"))
        return b""
