# ruff: noqa: F403  (this package is one vocabulary: `m.RankSealed`, whichever module has it)
"""The vocabulary of the protocol: events, instructions, and what keepers say to one another.

Three families, told apart by what happens to them:

- *events* (past tense): the runtime saw something and calls `handle(event)` on a machine;
- *instructions* (imperative): a machine's answer, which the runtime carries out **in order**;
- *wire messages* (frozen nouns and participles): travel between `NodeProtocol` and
  `CoordinatorProtocol` inside `Send` and `MessageReceived`, also when both sit in one keeper.

Every keeper owns one NodeProtocol and one CoordinatorProtocol.  A received wire message goes to the
coordinator if its type is in `TO_COORDINATOR`, else to the node.  All may be lost, doubled or late:
machines repeat what is unanswered (on `TimePassed`) and ignore what they have seen.  Nothing here
reads a clock; the only time is `TimePassed.now_s`.  Only types live here, no rules.
"""

from autockpt.executors.protocol.messages.coordinator_events import *
from autockpt.executors.protocol.messages.coordinator_instructions import *
from autockpt.executors.protocol.messages.facts import *
from autockpt.executors.protocol.messages.families import *
from autockpt.executors.protocol.messages.node_events import *
from autockpt.executors.protocol.messages.node_instructions import *
from autockpt.executors.protocol.messages.to_coordinator import *
from autockpt.executors.protocol.messages.to_node import *
from autockpt.executors.protocol.messages.wire_format import *
