"""Which launchers are the job, which of them are lost, and which ones are spares.

torchelastic's rendezvous lets any launcher take any free place.  While a job starts again its
places are free for a moment, and a spare node would take the place of one that lives.  Here a
launcher that finds a whole job waits until one of its members is lost.  It then claims the place of
that member.

A member is lost when its signs of life have ended, as torchelastic sees it, which takes 3 s.  While
ranks start again half of that is enough where the keepers have no connection to its node either.

What all launchers know stands in the rendezvous' store.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from autockpt.launch.elastic.rendezvous.polls import poll_s
from autockpt.launch.elastic.rendezvous.store_connection import StoreConnection

PREFIX = "autockpt/members"
LOOK_S = 0.1
"""How often a spare looks whether there is a place, and a member whether another one is lost."""
SILENT_S = 1.5
"""A launcher gives a sign of life each second: one that gave none for so long, and whose keeper has
no connection, is lost.  Either alone is not enough: a keeper may die beside a living launcher."""
ABSENT_S = 30.0
"""A member that has left the rendezvous and does not come again for so long is lost."""
CLAIM_S = 60.0
"""A claimed place whose launcher does not come for so long may be claimed again."""
SAID_AFTER = 50
"""Looks: a replacement of a node that was lost a moment ago is no spare."""
WAITS = (
    "all places of this job are taken: this node is a spare, and takes the place of the first node "
    "that is lost"
)
OVER = "the job has ended, and this spare node was not needed"
STORE_GONE = (
    "the node that keeps the rendezvous does not answer any more, as where a job has ended; this "
    "spare node leaves"
)
STORE_LOST = "the connection to the rendezvous is lost: this spare node connects again"
STORE_BACK = "this spare node is connected to the rendezvous again"
LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)

Name = tuple[str, int, int]
"""A launcher in the rendezvous: address, process, number within the process."""


class NotNeeded(SystemExit):
    """The job is over, and this launcher had no part in it."""


class Full(Exception):
    """The job has begun with other launchers than this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The launchers of the newest start."""

    round: int
    """Of the rendezvous."""
    names: Mapping[int, Name]
    """By number of the node."""


class Membership:
    """The members, as one launcher sees them."""

    def __init__(self, handler: Any, lost_nodes: Callable[[], Iterable[int]]) -> None:
        """`lost_nodes`: nodes to which keepers have lost the connection."""
        self._handler, self._lost_nodes = handler, lost_nodes
        self._members: Members | None = None
        """Of the newest start that this launcher knows."""
        self._meets = False
        """This launcher is in the rendezvous now."""
        self._looked_s = 0.0
        self._signs: dict[Name, tuple[Any, float]] = {}
        """Newest sign of life by member, and since when it has been the newest, CLOCK_MONOTONIC."""
        self._told: set[Name] = set()
        """Lost members that this launcher has told."""
        self._absent_s: dict[Name, float] = {}
        """Since when a member has been absent, CLOCK_MONOTONIC."""
        self._claims: dict[str, tuple[str, float]] = {}
        """Claim of another launcher by place, and since when it is known."""
        self._holder: Any = getattr(handler, "_state_holder", None)
        needed = ("sync", "_dead_nodes", "_sanitize", "_cache_duration", "_backend")
        self._works = all(hasattr(self._holder, name) for name in needed)
        """Another version of torch may lack a part: nodes then meet as torchelastic has it."""
        if self._works:
            self._open_store()
            holder: Any = self._holder
            self._theirs, holder.sync = holder.sync, self._sync

    def _open_store(self) -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        handler = self._handler
        self._store = PrefixStore(f"{PREFIX}/{handler.get_run_id()}", handler._store)

    @property
    def name(self) -> Name:
        """Of this launcher."""
        return _name(self._handler._this_node) if self._works else ("", 0, 0)

    # ------------------------------------------------------------------ a rendezvous

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """As long as it lasts this launcher looks often, and for lost members.

        Raises Full.
        """
        if not self._works:
            yield
            return
        # torchelastic takes a state of up to a second ago for the present one.
        before, self._holder._cache_duration = self._holder._cache_duration, 0
        self._meets = True
        self._signs.clear()
        try:
            yield
        finally:
            self._meets = False
            self._holder._cache_duration = before

    def met(self, names: Mapping[int, Name], *, first: bool) -> None:
        """A start has these members; `first`: this launcher tells the spares."""
        if not self._works:
            return
        self._members = Members(round=self._holder.state.round, names=dict(names))
        self._told.clear()
        if first:
            rows = [[number, *name] for number, name in names.items()]
            self._store.set("members", json.dumps([self._members.round, rows]))

    def _sync(self) -> Any:
        """In place of the rendezvous' own, on any of its threads."""
        has_set = self._theirs()
        for dead in self._holder._dead_nodes:
            self._tell_lost(_name(dead))
        state = self._holder.state
        if not self._meets or not state.complete:
            return has_set
        self._remove_lost(state)
        node = self._handler._this_node
        known = node in {*state.participants, *state.wait_list, *state.redundancy_list}
        is_full = len(state.participants) >= self._handler.settings.max_nodes
        if is_full and not known and not state.closed:
            raise Full
        return has_set

    def _remove_lost(self, state: Any) -> None:
        """The others wait no longer for members whose nodes are lost.

        Only members that still stand in the rendezvous of the last start; another one is alive.
        """
        if self._members is None or time.monotonic() < self._looked_s + LOOK_S:
            return
        self._looked_s = now_s = time.monotonic()
        silent = set[Name]()
        for node in state.participants:
            sign, name = state.last_heartbeats.get(node), _name(node)
            newest, since_s = self._signs.get(name, (None, now_s))
            if newest != sign or sign is None:
                self._signs[name] = (sign, now_s)
            elif now_s >= since_s + SILENT_S:
                silent.add(name)
        nodes = set(self._lost_nodes()) if silent - {self.name} else set()
        lost = {name for number, name in self._members.names.items() if number in nodes}
        there = [node for node in state.participants if _name(node) in lost & silent - {self.name}]
        for node in there:
            state.last_heartbeats[node] = LONG_AGO
            self._tell_lost(_name(node))
        if there:
            self._holder._sanitize()
            self._holder.mark_dirty()

    def _tell_lost(self, name: Name) -> None:
        if self._members is not None and name not in self._told:
            self._told.add(name)
            with contextlib.suppress(RuntimeError):  # the store is gone, as the next look says
                self._store.set(self._lost(self._members, name), "1")

    def _lost(self, members: Members, name: Name) -> str:
        """A machine may give the process of a replacement the same number."""
        return "/".join(map(str, ("lost", members.round, *name)))

    # ------------------------------------------------------------------ a spare

    def await_place(
        self, most_nodes: int, say: Callable[[str], object], idle: Callable[[], object]
    ) -> None:
        """Waits until there is a place for this launcher.

        `idle`: called at every look.  Raises NotNeeded when the job ends meanwhile.
        """
        if not self._works:
            return
        from torch.distributed import DistNetworkError, DistStoreError
        from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

        looks = 0
        while True:
            try:
                if self._has_place(most_nodes):
                    return
                if self._holder.state.closed:
                    break
            except (RendezvousConnectionError, DistNetworkError, DistStoreError):
                if not looks:
                    return  # the rendezvous says what is wrong
                self._connect_again(say, idle)
            looks += 1
            if looks == SAID_AFTER:
                say(WAITS)
            idle()
            time.sleep(max(LOOK_S, poll_s(most_nodes)))
        if looks:
            say(OVER)
            raise NotNeeded(0)

    def _connect_again(self, say: Callable[[str], object], idle: Callable[[], object]) -> None:
        """Raises NotNeeded where the job is over."""
        say(STORE_LOST)
        connection = StoreConnection(self._handler)
        while not connection.try_again():
            if connection.is_gone:
                say(STORE_GONE)
                raise NotNeeded(0)
            idle()
            time.sleep(LOOK_S)
        self._open_store()
        say(STORE_BACK)

    def _has_place(self, most_nodes: int) -> bool:
        """Whether this launcher may go to the rendezvous now."""
        self._members = members = self._read()
        if members is None or self.name in members.names.values():
            return True
        self._sync()
        state = self._holder.state
        lost = [name for name in members.names.values() if self._is_lost(members, name, state)]
        places = [self._lost(members, name) for name in lost]
        places += [f"free/{members.round}/{n}" for n in range(most_nodes - len(members.names))]
        return any(self._claim(place) for place in places)

    def _read(self) -> Members | None:
        if not self._store.check(["members"]):
            return None
        told, rows = json.loads(self._store.get("members"))
        names = {number: (address, pid, local) for number, address, pid, local in rows}
        return Members(round=told, names=names)

    def _is_lost(self, members: Members, name: Name, state: Any) -> bool:
        if self._store.check([self._lost(members, name)]):
            return True
        if name in {_name(node) for node in (*state.participants, *state.wait_list)}:
            self._absent_s.pop(name, None)
            return False
        since_s = self._absent_s.setdefault(name, time.monotonic())
        return time.monotonic() > since_s + ABSENT_S

    def _claim(self, place: str) -> bool:
        """Whether the place is this launcher's."""
        key, mine = f"claim/{place}", json.dumps(self.name)
        found = bytes(self._store.compare_set(key, "", mine)).decode()
        if found == mine:
            return True
        claim, since_s = self._claims.setdefault(place, (found, time.monotonic()))
        if claim != found:
            del self._claims[place]
        elif time.monotonic() > since_s + CLAIM_S:
            return bytes(self._store.compare_set(key, found, mine)).decode() == mine
        return False


def _name(node: Any) -> Name:
    return (node.addr, node.pid, node.local_id)
