"""Takes back the work that a script does behind loops that are trained already.

Work once an epoch stands behind the loop of that epoch.  A restart of such a script goes through
the loops from the first one on.  Loops that are trained have nothing left, but the work behind them
runs again, on a state that contains it: a scheduler steps twice.  So the state is put back.
"""

import copy
from typing import Any

import torch

from autockpt.executors.linux.signal_errors import is_from_handler
from autockpt.executors.state.live_state import Dispensable, LiveState, local_part
from autockpt.session.base import RankState
from autockpt.session.place.replay_check import state_digest
from autockpt.session.place.training_position import TrainingPosition

_ADVICE = "; `for epoch in range(ckpt.epoch, epochs)` leaves that work out"


class PassedLoops:
    """The state as it was restored, from the first loop on that has nothing left."""

    def __init__(self, rank: RankState, position: TrainingPosition) -> None:
        self._rank, self._position = rank, position
        self._held: _Held | None = None
        self._again: set[str] = set()
        """Objects that were put back."""
        self._changed: list[str] = []
        """Tensors that were written to again."""
        self._script: dict[str, Any] = {}
        """States of the script's generators."""

    def passed(self) -> None:
        """A loop had nothing left.  The work behind the former one is taken back."""
        rank = self._rank
        if not rank.start_step or rank.step != rank.start_step or rank.rebuilding is not None:
            return
        if self._held is not None:
            self._put_back(self._held, compares=self._position.was_over)
            return
        try:
            self._held, self._script = _Held(rank.live), self._position.script_states()
            self._position.put_over_back(self._script)
        except Exception as error:
            if is_from_handler(error):
                raise
            rank.say(f"work behind loops that are trained is not taken back: {error!r:.200}")

    def begins(self) -> None:
        """A loop has an iteration left.

        A checkpoint of a loop's end lacks the work behind that loop, which is left as it is.
        """
        held, self._held = self._held, None
        if held is None:
            return
        if not self._position.was_over:
            self._put_back(held, compares=True)
        advice, changed = _ADVICE if self._position.are_passes else "", self._changed
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            self._rank.report_degraded(
                "loop",
                f"{changed[0]}{more} was changed between attach and the loop, by work behind loops "
                f"that are trained already. So the training differs from one without a restart"
                f"{advice}",
            )
        elif self._again:
            these = ", ".join(sorted(self._again))
            self._rank.say(
                f"the work behind loops that are trained already ran again; {these}: put back to "
                f"step {self._rank.start_step}{advice}"
            )

    def _put_back(self, held: "_Held", *, compares: bool) -> None:
        """`compares`: the tensors as well, which reads all of them."""
        try:
            if compares and not self._changed:
                self._changed = held.changed_tensors(self._rank.live)
            self._again |= held.put_back(self._rank.live)
            self._position.put_over_back(self._script)
        except Exception as error:
            if is_from_handler(error):
                raise
            self._rank.report_degraded(
                "loop",
                "work behind loops that are trained already could not be taken back: "
                f"{error!r:.200}",
            )


class _Held:
    """Settings of optimizers and the state of other objects; of tensors only sums of bytes."""

    def __init__(self, live: LiveState) -> None:
        self._groups = {name: _settings(one) for name, one in live.optimizers.items()}
        self._others = {
            name: copy.deepcopy(one.state_dict())
            for name, one in live.others.items()
            if not isinstance(one, Dispensable)
        }
        self._sums = _sums(live)

    def put_back(self, live: LiveState) -> set[str]:
        """Names of the objects that had another state."""
        again = set()
        for name, state in self._others.items():
            if state_digest(live.others[name].state_dict()) != state_digest(state):
                live.others[name].load_state_dict(copy.deepcopy(state))
                again.add(name)
        for name, groups in self._groups.items():
            optimizer = live.optimizers[name]
            if state_digest(_settings(optimizer)) == state_digest(groups):
                continue
            again.add(name)
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                for key, value in settings.items():
                    if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                        group[key].copy_(value)  # a compiled step may hold this one
                    else:
                        group[key] = copy.deepcopy(value)
        return again

    def changed_tensors(self, live: LiveState) -> list[str]:
        """Names of parameters, buffers and optimizer state that were written to since."""
        now = _sums(live)
        return [name for name, total in self._sums.items() if now.get(name) != total]


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of each group what is no parameter."""
    groups = ({k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups)
    return [copy.deepcopy(group) for group in groups]


def _sums(live: LiveState) -> dict[str, int]:
    """The sum of each tensor's bytes: it changes with nearly every write, `.data` included."""
    named = {**live.inventory().locals, **{n: local_part(b) for n, b in live.buffers().items()}}
    sums: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, tensor in named.items():
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        sums.setdefault(tensor.device, {})[name] = flat.sum(dtype=torch.int64)
    found: dict[str, int] = {}
    for each in sums.values():
        found |= zip(each, torch.stack([*each.values()]).tolist(), strict=True)  # one wait
    return found
