"""Hypothesis strategies for any record, built from its fields; validated fields have their own."""

import dataclasses
import types
import typing
from typing import Any, Literal

from hypothesis import strategies as st

from autockpt.values.failure import Exposure, Incident
from autockpt.values.generation import Generation
from autockpt.values.goal import Goal
from autockpt.values.placement import FailureDomains
from autockpt.values.plan import Choice, Staging, TierPlan, WriteWay
from autockpt.values.redundancy import Redundancy

TEXT = st.text(max_size=12)
FLOATS = st.floats(width=64)  # NaN and infinities too: they travel as words
INTS = st.integers(-(2**63), 2**63)

WRITES: dict[str, st.SearchStrategy[Any]] = {
    "chunk_bytes": st.sampled_from([2**16, 2**23, 2**26]),
    "writers": st.integers(1, 512),
}

VALIDATED: dict[type, dict[str, st.SearchStrategy[Any]]] = {
    Generation: {
        "term": st.integers(1, 10**6 - 1), "step": st.integers(0, 10**9 - 1),
        "attempt": st.integers(0, 99),
    },
    WriteWay: WRITES,
    Staging: {
        **WRITES,
        "in_flight": st.integers(0, 16),
        "window_margin": st.floats(0.0, 0.99),
        "compare_writes": st.sampled_from([(), (WriteWay(writers=2), WriteWay(direct_io=False))]),
        "compare": st.sampled_from([(), ("windows", "lazy"), ("lazy", "blocking", "windows")]),
    },
    Goal: {
        "storage_path": st.none() | st.text("abc /.-", min_size=1, max_size=12).filter(str.strip)
    },
    TierPlan: {"interval_steps": st.integers(0, 10**9), "chain": st.integers(0, 16)},
    Choice: {"reason": st.text(min_size=1, max_size=12)},
    Incident: {"at_s": st.floats(-1e12, 1e12)},
    Exposure: {
        "begin_s": st.floats(-1e12, 0.0), "end_s": st.floats(0.0, 1e12),
        "node_s": st.floats(0.0, 1e15), "job_s": st.floats(0.0, 1e15),
    },
}  # fmt: skip
"""Fields that a record checks beyond their type."""

RATES = st.floats(0.0, 1e15)
SETS = st.integers(1, 16).flatmap(
    lambda parity: st.builds(
        Redundancy, scheme=st.just("xor" if parity == 1 else "rs"), parity=st.just(parity),
        set_size=st.integers(parity + 1, 256), rate_bytes_per_s=RATES,
    )
)  # fmt: skip
LABELS = st.integers(0, 3).flatmap(
    lambda levels: st.builds(
        FailureDomains,
        levels=st.lists(TEXT, min_size=levels, max_size=levels).map(tuple),
        labels=st.lists(st.tuples(*[TEXT] * levels), max_size=3).map(tuple),
    )
)
WHOLE: dict[type, st.SearchStrategy[Any]] = {
    Redundancy: st.one_of(
        st.builds(Redundancy, floor=st.integers(0, 15)),
        st.builds(Redundancy, scheme=st.just("replicas"), copies=st.integers(2, 16)),
        SETS,
    ),
    FailureDomains: LABELS,
}
"""Records whose fields depend on each other."""


def records(cls: type) -> st.SearchStrategy[Any]:
    """Any value of a record class, defaults left out at random."""
    if cls in WHOLE:
        return WHOLE[cls]
    hints = typing.get_type_hints(cls)
    own = VALIDATED.get(cls, {})
    required: dict[str, st.SearchStrategy[Any]] = {}
    optional: dict[str, st.SearchStrategy[Any]] = {}
    for field in dataclasses.fields(cls):
        if field.name == "schema_version":
            continue
        strategy = own[field.name] if field.name in own else of_type(hints[field.name])
        (required if _is_required(field) else optional)[field.name] = strategy
    return st.fixed_dictionaries(required, optional=optional).map(lambda kwargs: cls(**kwargs))


def of_type(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type that records may hold."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return records(typing.cast(type, kind))
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(of_type(arg) for arg in args))
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(of_type(args[0]), max_size=2).map(tuple)
    if origin is dict:
        return st.dictionaries(TEXT, of_type(args[1]), max_size=2)
    plain = {bool: st.booleans(), int: INTS, float: FLOATS, str: TEXT, type(None): st.none()}
    return plain[kind]


def wrong_value(kind: Any) -> Any:
    """JSON data that no value of `kind` is written as."""
    if any(typing.get_origin(one) is tuple for one in (kind, *typing.get_args(kind))):
        return {"not": "a list"}
    return ["neither", "of", "these"]


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing
