"""Takes back the work that a script does behind loops that are trained already.

Work once an epoch stands behind the loop of that epoch.  A restart of such a script goes through
the loops from the first one on.  Loops that are trained have nothing left, but the work behind them
runs again, on a state that contains it: a scheduler steps twice.  So the state is put back.
"""

import copy
from typing import Any

import torch

from autockpt.executors.linux.signal_errors import is_from_handler
from autockpt.executors.state.live_state import Dispensable, LiveState
from autockpt.session.base import RankState
from autockpt.session.place.replay_check import state_digest

_ADVICE = "`for epoch in range(ckpt.epoch, epochs)` leaves that work out"


class PassedLoops:
    """The state as it was restored, from the first loop on that has nothing left."""

    def __init__(self, rank: RankState) -> None:
        self._rank = rank
        self._held: _Held | None = None
        self._again: set[str] = set()
        """Objects that were put back."""

    def passed(self) -> None:
        """A loop had nothing left.  The work behind the former one is taken back."""
        rank = self._rank
        if not rank.start_step or rank.step != rank.start_step or rank.rebuilding is not None:
            return
        if self._held is not None:
            self._put_back(self._held)
            return
        try:
            self._held = _Held(rank.live)
        except Exception as error:
            if is_from_handler(error):
                raise
            rank.say(f"work behind loops that are trained is not taken back: {error!r:.200}")

    def begins(self, *, was_over: bool) -> None:
        """A loop has an iteration left.

        `was_over`: the checkpoint is of a loop's end, so that it lacks the work behind that loop.
        """
        held, self._held = self._held, None
        if held is None:
            return
        if not was_over:
            self._put_back(held)
        changed = held.changed_tensors(self._rank.live)
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            self._rank.report_degraded(
                "loop",
                f"{changed[0]}{more} was changed between attach and the loop, by work behind loops "
                f"that are trained already. So the training differs from one without a restart; "
                f"{_ADVICE}",
            )
        elif self._again:
            these = ", ".join(sorted(self._again))
            self._rank.say(
                f"the work behind loops that are trained already ran again; {these}: put back to "
                f"step {self._rank.start_step}. {_ADVICE}"
            )

    def _put_back(self, held: "_Held") -> None:
        try:
            self._again |= held.put_back(self._rank.live)
        except Exception as error:
            if is_from_handler(error):
                raise
            self._rank.report_degraded(
                "loop",
                "work behind loops that are trained already could not be taken back: "
                f"{error!r:.200}; {_ADVICE}",
            )


class _Held:
    """Settings of optimizers and the state of other objects; of tensors only their versions."""

    def __init__(self, live: LiveState) -> None:
        self._groups = {name: _settings(one) for name, one in live.optimizers.items()}
        self._others = {
            name: copy.deepcopy(one.state_dict())
            for name, one in live.others.items()
            if not isinstance(one, Dispensable)
        }
        self._versions = _versions(live)

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
        now = _versions(live)
        return [name for name, version in self._versions.items() if now.get(name) != version]


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of each group what is no parameter."""
    groups = ({k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups)
    return [copy.deepcopy(group) for group in groups]


def _versions(live: LiveState) -> dict[str, int]:
    """torch counts what is written to a tensor in place.  Tensors of inference have no count."""
    named = {**live.lazy_tensors(), **live.buffers()}
    return {name: one._version for name, one in named.items() if not one.is_inference()}
