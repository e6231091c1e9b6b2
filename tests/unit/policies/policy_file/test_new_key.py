"""A new row in the table of keys is all that a new key takes."""

from dataclasses import dataclass, replace

import pytest

from autockpt.policies.policy_file import (
    KeyTable,
    diff,
    explain,
    init_text,
    keys_table,
    parse_policy,
    schema,
    settings_between,
    with_settings,
)
from autockpt.policies.policy_file.table import KEYS
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal, Pins
from autockpt.values.plan import is_chunk
from autockpt.values.policy_keys.key import key
from autockpt.values.policy_keys.kinds import Chunk, Count


@dataclass(frozen=True, slots=True, kw_only=True)
class WiderPins(Pins):
    """The table with one more row."""

    stripes: int | None = key("disk.stripes", Count(1, 8), "files per shard", more="As RAID does")


TABLE = KeyTable(replace(Goal(), pins=WiderPins()))


def test_a_new_key_is_read_from_every_layer_and_shown_with_its_place() -> None:
    """File, environment and --set; `auto` takes it back."""
    text = "version: 1\ndisk: {stripes: 2}\n"
    policy = parse_policy(text, file="p.yaml", table=TABLE)
    assert policy.goal.pins == WiderPins(stripes=2)
    assert explain(policy, "disk.stripes") == "disk.stripes  2  p.yaml:2"
    variable = parse_policy(text, environment={"AUTOCKPT_DISK_STRIPES": "3"}, table=TABLE)
    assert variable.goal.pins == WiderPins(stripes=3)
    option = parse_policy(text, settings=["disk.stripes=auto"], table=TABLE)
    assert option.goal.pins == WiderPins()
    assert [str(one) for one in diff(policy, variable)] == ["disk.stripes: 2 -> 3"]


def test_a_new_key_has_its_errors() -> None:
    """Its range, its spelling, and in the table without it its absence."""
    with pytest.raises(ConfigError, match=r"p.yaml:2:17: error: disk.stripes: expected auto or a "):
        parse_policy("version: 1\ndisk: {stripes: 9}\n", file="p.yaml", table=TABLE)
    with pytest.raises(ConfigError, match=r"did you mean 'disk.stripes'"):
        with_settings(Goal(), ["stripes=2"], TABLE)
    with pytest.raises(ConfigError, match=r"disk.stripes: unknown field"):
        parse_policy("version: 1\ndisk: {stripes: 2}\n")


def test_a_new_key_is_written_back() -> None:
    """As --set takes it."""
    before = parse_policy("version: 1", table=TABLE).goal
    after = with_settings(before, ["disk.stripes=4"], TABLE)
    assert settings_between(before, after, TABLE) == {"disk.stripes": "4"}


def test_a_new_key_is_described() -> None:
    """In the JSON schema, also for overrides, in the starter file and in the documents."""
    described = schema(TABLE)["$defs"]["Disk"]["properties"]["stripes"]
    assert described["description"] == "files per shard"
    assert {"type": "integer", "minimum": 1, "maximum": 8} in described["anyOf"]
    assert "  stripes: auto              # files per shard (1 to 8)\n" in init_text(TABLE)
    assert "| `disk.stripes` | 1 to 8 | files per shard. As RAID does |\n" in keys_table(TABLE)
    assert "stripes" not in keys_table()


def test_every_key_has_one_row_and_a_text() -> None:
    """Each is one line in an editor, and begins in lower case as the others do."""
    assert len(KEYS.rows) == 61
    for row in KEYS.rows.values():
        assert row.doc, row.path
        assert len(row.doc) <= 100, row.path
        assert not row.doc.endswith("."), row.path


@pytest.mark.parametrize("nbytes", [2**15, 2**16, 3 * 2**20, 2**23, 2**30, 2**31])
def test_a_chunk_is_what_a_plan_takes(nbytes: int) -> None:
    """The key refuses no chunk that a plan takes, and takes none that a plan refuses."""
    try:
        taken = Chunk("8 MiB").read(f"{nbytes} B") == nbytes
    except ValueError:
        taken = False
    assert taken == is_chunk(nbytes)
