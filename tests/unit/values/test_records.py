"""Every record of `values/` keeps the contract of values; the list is read from the modules."""

import dataclasses
import importlib
import json
import pkgutil

import pytest
from hypothesis import given

import autockpt.values
from autockpt.executors.image.container import StoredChunk
from autockpt.executors.storage.directory.claims import TermFile
from autockpt.executors.storage.directory.records import RunFile
from autockpt.values.errors import ConfigError
from autockpt.values.plan import CheckpointPlan, safe_default_plan
from autockpt.values.record import from_json, parse_json, to_data, to_json
from autockpt.values.telemetry import EVENTS, event_data, event_from_data
from tests.contracts.records import records
from tests.contracts.values_contract import QUICK, RecordContract


def values_records() -> list[type]:
    """All dataclasses defined in the room."""
    found = []
    for module in pkgutil.iter_modules(autockpt.values.__path__):
        name = f"autockpt.values.{module.name}"
        members = vars(importlib.import_module(name)).values()
        found += [
            m for m in members
            if isinstance(m, type) and dataclasses.is_dataclass(m) and m.__module__ == name
        ]  # fmt: skip
    return found


RECORDS = [*values_records(), RunFile, TermFile, StoredChunk]

for _record in RECORDS:
    _name = f"Test{_record.__name__}"
    globals()[_name] = type(
        _name, (RecordContract,), {"record": _record, "__doc__": f"The contract, on {_record}."}
    )


def test_every_record_of_the_room_is_tested() -> None:
    """The loop above found them: nobody adds a record without the contract."""
    assert {"Profile", "Goal", "Decision", "CheckpointPlan", "FailureRecord", "Restored"} <= {
        record.__name__ for record in RECORDS
    }


@pytest.mark.parametrize("kind", EVENTS.values(), ids=EVENTS)
def test_an_event_keeps_its_kind(kind: type) -> None:
    """One line of telemetry says what it is."""

    @QUICK
    @given(records(kind))
    def check(event: object) -> None:
        line = json.dumps(event_data(event))  # type: ignore[arg-type]
        again = event_from_data(json.loads(line))
        assert type(again) is kind
        assert json.dumps(event_data(again)) == line

    check()


def test_an_unknown_event_is_of_another_version() -> None:
    """Of a newer one, say: its telemetry file is read with that."""
    another = r"line 3: unknown event 'Exploded': another version of autockpt wrote it"
    with pytest.raises(ConfigError, match=another):
        event_from_data({"event": "Exploded"}, where="line 3")
    with pytest.raises(ConfigError, match=r"line 4: unknown event \[\]"):
        event_from_data({"event": []}, where="line 4")


def test_a_path_leads_to_the_nested_field() -> None:
    """Errors name the way through tuples and records."""
    data = to_data(safe_default_plan())
    data["tiers"][1]["interval_steps"] = "often"
    with pytest.raises(ConfigError, match=r"p\.json\.tiers\[1\]\.interval_steps: expected int"):
        from_json(CheckpointPlan, json.dumps(data), where="p.json")


@pytest.mark.parametrize("chunk_bytes", [3, 2**15, 2**31])
def test_a_refused_value_names_its_path_too(chunk_bytes: int) -> None:
    """A record that checks its own values does not lose where they stood."""
    data = to_data(safe_default_plan())
    data["staging"]["chunk_bytes"] = chunk_bytes
    with pytest.raises(ConfigError, match=rf"p\.json\.staging: chunk of {chunk_bytes} bytes"):
        from_json(CheckpointPlan, json.dumps(data), where="p.json")


@pytest.mark.parametrize("one", ["[%s]", '{"a":%s}'])
@pytest.mark.parametrize("where", ["%s", '{"tiers":%s}', '{"tiers":[{"interval_steps":%s}]}'])
@pytest.mark.parametrize("depth", [120, 330, 480, 990])
def test_what_is_nested_too_deep_to_be_shown_is_refused(one: str, where: str, depth: int) -> None:
    """JSON is read deeper than Python writes it down: the error itself would fail."""
    text = "3"
    for _ in range(depth):
        text = one % text
    with pytest.raises(ConfigError, match=r"p\.json: not valid JSON: nested more than 100 deep"):
        from_json(CheckpointPlan, where % text, where="p.json")


def test_many_records_in_a_row_are_not_deep() -> None:
    """Nesting counts, not brackets."""
    assert parse_json("[" + "[[],{}]," * 5000 + "0]")[4999] == [[], {}]
    assert parse_json("[" * 100 + "]" * 100) is not None
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        parse_json("[" * 101 + "]" * 101)


def test_an_integer_beyond_every_float_is_refused() -> None:
    """10^400 seconds are no duration and no crash."""
    text = to_json(safe_default_plan()).replace('"overhead_budget":null', '"overhead_budget":1e3')
    huge = text.replace("1e3", "1" + "0" * 400)
    with pytest.raises(ConfigError, match=r"overhead_budget: expected a float"):
        from_json(CheckpointPlan, huge)
