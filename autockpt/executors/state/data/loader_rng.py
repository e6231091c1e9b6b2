"""Loaders with a state of their own go on without a draw that the undisturbed run did not make.

A DataLoader draws a seed for its workers from the global generator when it makes an iterator.  An
iterator from a loaded state replaces one that drew its seed before the checkpoint.  If it drew
again, every later random number of the training would shift.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from autockpt.executors.state.rng import rng_state, set_rng_state


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Put the random state back at the end, so that draws within do not count."""
    before = rng_state()
    try:
        yield
    finally:
        set_rng_state(before)


def load_without_rng_draw(
    loader: Any, state: Any, *, begun: bool = False, seeds: Any = None
) -> None:
    """`load_state_dict` of anything; the iterator that a DataLoader makes from it draws nothing.

    `begun`: the state is known to be of an epoch under way.  torchdata's loaders say it themselves:
    they make an iterator to take the state, and another one if that is at its end.  `seeds`: from
    `seeds_of`.
    """
    if isinstance(loader, DataLoader) and (begun or is_torchdata(loader)):
        loader.__dict__[_MAKER] = _Once(loader, seeds)
    loader.load_state_dict(state)


def seeds_of(loader: Any) -> dict[str, Any]:
    """{"seeds": state of the `generator` argument} if no other object keeps it, else {}.

    torchdata's sampler says where in it an order began, and its loader draws seeds from it too.
    """
    sampler = getattr(loader, "sampler", None)
    generator = getattr(loader, "generator", None)
    if not is_torchdata(loader) or generator is None:
        return {}
    # Others may draw from it with the first index only, and it must be what it was then.
    known = type(sampler).__module__.startswith("torchdata.")
    return {"seeds": generator.get_state()} if known else {}


def is_torchdata(loader: Any) -> bool:
    """One of its stateful loaders."""
    return isinstance(loader, DataLoader) and "next_iter_state" in loader.__dict__


def is_streamed(loader: Any) -> bool:
    """A DataLoader over a data set of Hugging Face that streams."""
    dataset = loader.dataset if isinstance(loader, DataLoader) else None
    kind = next((k for k in type(dataset).__mro__ if k.__module__.startswith("datasets.")), None)
    return kind is not None and isinstance(dataset, IterableDataset)


def forget(loader: Any) -> None:
    """The epoch has ended: iterators are made as ever."""
    if isinstance(loader, DataLoader) and isinstance(loader.__dict__.get(_MAKER), _Once):
        del loader.__dict__[_MAKER]


_MAKER = "_get_iterator"


class _Once:
    """In place of a loader's `_get_iterator`, which `iter` calls, maybe with the first batch."""

    def __init__(self, loader: "DataLoader[Any]", seeds: Any) -> None:
        self._loader, self._seeds = loader, seeds

    def __call__(self) -> Any:
        forget(self._loader)
        with preserve_rng():
            made = self._loader._get_iterator()
        if self._seeds is not None and self._loader.generator is not None:
            self._loader.generator.set_state(self._seeds)
        return made
