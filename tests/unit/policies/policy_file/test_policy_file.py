"""Policy files: YAML 1.2, layers with their places, and errors to the exact character."""

import json
import re

import pytest

from autockpt.policies.policy_file import (
    KEYS,
    as_yaml,
    diff,
    explain,
    goal_of_environment,
    init_text,
    load_policy,
    parse_policy,
    schema,
    settings_between,
    with_settings,
)
from autockpt.policies.policy_file.document import parse
from autockpt.policies.registry import preset_text, presets
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal

BAD = """version: 1
intervall: 15 min
disk:
  writers: 4
  chunk: 3 MiB
  writers: 8
  codec: zst
limits: {overhead: 2, stall: 8 MiB}
keep:
  last: 0
retune: yes
objective: null
staging: lazy
overrides:
  - when: {world_sizes: ">=512"}
    set: {disk: {writer: 8}}
"""

GOLDEN = """bad.yaml:2:1: error: intervall: unknown field; did you mean 'interval'?
    2 | intervall: 15 min
      | ^
bad.yaml:5:10: error: disk.chunk: '3 MiB' is not a power of two from 64 KiB to 1 GiB, e.g. 8 MiB
    5 |   chunk: 3 MiB
      |          ^
bad.yaml:6:3: error: disk.writers: duplicate key, first on line 4
    6 |   writers: 8
      |   ^
bad.yaml:7:10: error: disk.codec: expected auto, none or planes or delta or zstd, got 'zst'; did \
you mean 'zstd'?
    7 |   codec: zst
      |          ^
bad.yaml:8:20: error: limits.overhead: a bare number is ambiguous; write a unit, e.g. 2 %
    8 | limits: {overhead: 2, stall: 8 MiB}
      |                    ^
bad.yaml:8:30: error: limits.stall: '8 MiB': unknown unit 'MiB'; did you mean min?
    8 | limits: {overhead: 2, stall: 8 MiB}
      |                              ^
bad.yaml:10:9: error: keep.last: expected auto or a whole number from 1 to 1000000, got 0
   10 |   last: 0
      |         ^
bad.yaml:11:9: error: retune: expected true, false, observe or auto, got 'yes'
   11 | retune: yes
      |         ^
bad.yaml:12:12: error: objective: null is not a value; write auto, or leave the key out
   12 | objective: null
      |            ^
bad.yaml:13:10: error: staging: expected a mapping of keys to values, got 'lazy'
   13 | staging: lazy
      |          ^
bad.yaml:15:12: error: overrides[0].when.world_sizes: unknown field; did you mean 'world_size'?
   15 |   - when: {world_sizes: ">=512"}
      |            ^
bad.yaml:16:18: error: overrides[0].set.disk.writer: unknown field; did you mean 'writers'?
   16 |     set: {disk: {writer: 8}}
      |                  ^
AUTOCKPT_DISK_DIRECT=on: error: disk.direct: expected true, false or auto, got 'on'
--set disk.writer=3: error: disk.writer: unknown field; did you mean 'disk.writers'?
--set retune: error: expected key=value, e.g. disk.writers=4"""


def errors(text: str, **more) -> str:
    with pytest.raises(ConfigError, match="error") as caught:
        parse_policy(text, file="p.yaml", **more)
    return str(caught.value)


def test_all_errors_at_once_to_the_character():
    """Golden: every kind of mistake, in the order of the file, then variables, then options."""
    with pytest.raises(ConfigError, match="intervall") as caught:
        parse_policy(
            BAD,
            file="bad.yaml",
            environment={"AUTOCKPT_DISK_DIRECT": "on", "AUTOCKPT_LOG": "debug"},
            settings=["disk.writer=3", "retune"],
        )
    assert str(caught.value) == GOLDEN


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("interval: 5 min\n", "p.yaml:1:1: error: version: missing; every policy file starts"),
        ("version: 2\n", "p.yaml:1:10: error: version: version 2 needs a newer autockpt"),
        ("version: 1\ninterval: 15\n", "interval: a bare number is ambiguous; write a unit"),
        ("version: 1\ninterval: 0 steps\n", "interval: '0 steps' must be more than 0"),
        ("version: 1\ninterval: 1e20 h\n", "interval: '1e20 h' is longer than any training"),
        ("version: 1\ninterval: 1000000000001 steps\n", "steps' is longer than any training"),
        ("version: 1\ninterval: 1.5 steps\n", "'1.5 steps' is not a whole number of steps"),
        ("version: 1\nlimits: {stall: 2 m}\n", "unknown unit 'm'; did you mean min"),
        ("version: 1\nlimits: {overhead: 100 %}\n", "'100 %' must be less than 100 %"),
        ("version: 1\ninterval: 5 min\ndisk: {interval: 6 min}\n", "the same as disk.interval"),
        ("version: 1\ndisk: [1]\n", "disk: expected a mapping of keys to values"),
        ("version: 1\ndisk:\n", "disk: expected a mapping of keys to values, got None"),
        ("- 1\n", "p.yaml:1:1: error: expected a mapping of keys to values"),
        ("version: 1\ndisk: {chunk: 2 GiB}\n", "'2 GiB' is not a power of two from 64 KiB to 1"),
        ("version: 1\nchunk: 8 MiB\n", "chunk: unknown field; did you mean 'disk.chunk'?"),
        ("version: 1\nextends: builtin:autoo\n", "known: .*auto, .* did you mean 'auto'?"),
        ("version: 1\nextends: /nowhere.yaml\n", "p.yaml:2:10: error: extends: cannot be read"),
        ("version: 1\noverrides:\n  - set: {}\n", r"overrides\[0\].when: missing; an override has"),
        ("version: 1\nmemory: {enabled: false, interval: 5 s}\n", "memory.enabled is false"),
        (
            "version: 1\nmemory: {interval: 4 steps}\ndisk: {interval: 15 steps}\n",
            "p.yaml:3:18: error: disk.interval: .*15 steps is not a multiple of .* 16 steps",
        ),
        ("version: 1\nfailures: {notice: 30 s}\n", "failures.preemption, how often, is missing"),
        ("version: 1\narchive: {codec: excp}\n", "excp loses a part of what was trained; say"),
        ("version: 1\narchive: {codec: excp, lossy: false}\n", "archive.lossy: true, or use none"),
        ("a: &x 1\nb: *x\n", "p.yaml:2:4: error: not valid YAML: anchors and aliases"),
        ("a: !!python/object:os.system x\n", "tag tag:yaml.org,2002:python/object:os.system is"),
        ("a: [1\n", "p.yaml:2:1: error: not valid YAML"),
        ("a: " + "[" * 101, "p.yaml:1:104: error: not valid YAML: brackets are nested deeper"),
        ("- " * 3000, "p.yaml:1:1: error: not valid YAML: nested too deeply"),
        ("version: 1\n---\nversion: 1\n", "not valid YAML"),
        ("\tversion: 1\n", "not valid YAML"),
    ],
)
def test_single_mistakes_are_named(text, message):
    """One line each, at the place of the mistake."""
    assert re.search(message, errors(text))


def test_words_follow_yaml_1_2():
    """off, no, 1:30, 077, 1e3 and dates mean what they look like."""
    text = "a: off\nb: no\nc: 1:30\nd: 077\ne: 1e3\nf: 2026-01-01\ng: 0x10\nh: True\ni: .5\nj: ~\n"
    assert parse(text, "p.yaml").root.plain() == {
        "a": "off", "b": "no", "c": "1:30", "d": 77, "e": 1000.0, "f": "2026-01-01", "g": 16,
        "h": True, "i": 0.5, "j": None,
    }  # fmt: skip


def test_a_full_file_becomes_the_goal_it_says():
    """Every section once."""
    goal = parse_policy("""
version: 1
interval: 500 steps
objective: durability
memory: {interval: 30 s, slots: 4}
disk: {path: /data/ckpt, writers: 8, chunk: 16 MiB, direct: false, codec: zstd}
staging: {schedule: blocking, persist: sync, streaming: false, preallocate: false, path: host}
limits: {stall: 200 ms, host_memory: 64 GiB, overhead: 2 %, lost_time: 1 h 30 min}
failures: {mtbf: 8 h, process_share: 40 %, preemption: 6 h, notice: 2 min, silent_latency: 12 h,
           stuck: restart, rollback: skip}
restart: {standby: off}
keep: {last: 5, every: 6 h}
retune: false
rule: checkfreq
""").goal
    assert goal.pins.disk_interval_steps == 500
    assert goal.pins.memory_interval_s == 30.0
    assert (goal.pins.writers, goal.pins.chunk_bytes, goal.pins.slots) == (8, 16 * 2**20, 4)
    assert (goal.pins.direct_io, goal.pins.codec, goal.pins.retune) == (False, "zstd", False)
    assert (goal.pins.persist, goal.pins.streaming, goal.pins.path) == ("sync", False, "host")
    assert goal.limits.lost_time_s == 5400.0
    assert goal.limits.host_memory_bytes == 64 * 2**30
    assert (goal.limits.overhead, goal.limits.stall_s) == (0.02, 0.2)
    assert (goal.failures.mtbf_s, goal.failures.process_share) == (28800.0, 0.4)
    assert (goal.failures.preemption_s, goal.failures.notice_s) == (21600.0, 120.0)
    assert (goal.retention.keep_last, goal.retention.keep_every_s) == (5, 21600.0)
    assert goal.retention.reach_s == 43200.0
    assert (goal.storage_path, goal.objective) == ("/data/ckpt", "durability")
    assert goal.pins.interval_rule == "checkfreq"


def test_layers_win_in_the_documented_order_and_keep_their_place(tmp_path):
    """extends < file < environment < --set, each value with its source."""
    (tmp_path / "base.yaml").write_text(
        "version: 1\ninterval: 5 min\ndisk: {writers: 2, chunk: 1 MiB, codec: none}\n"
    )
    child = tmp_path / "child.yaml"
    child.write_text("version: 1\nextends: base.yaml\ndisk:\n  writers: 3\n  chunk: 2 MiB\n")
    policy = load_policy(
        str(child),
        environment={"AUTOCKPT_DISK_CHUNK": "4 MiB", "AUTOCKPT_KEEP_LAST": "7"},
        settings=["keep.last=9", "limits.stall=1 s"],
    )
    pins = policy.goal.pins
    assert (pins.disk_interval_s, pins.writers, pins.chunk_bytes) == (300.0, 3, 4 * 2**20)
    assert policy.goal.retention.keep_last == 9
    source = {value.path: value.source for value in policy.values}
    assert source["disk.interval"] == f"{tmp_path}/base.yaml:2"
    assert source["disk.writers"] == f"{child}:4"
    assert source["disk.chunk"] == "AUTOCKPT_DISK_CHUNK=4 MiB"
    assert source["keep.last"] == "--set keep.last=9"
    assert source["staging.schedule"] == "default"


def test_mistakes_in_an_extended_file_are_found_there(tmp_path):
    """Even where the extending file replaces the bad value."""
    (tmp_path / "base.yaml").write_text("version: 1\ndisk: {writers: many}\n")
    child = tmp_path / "child.yaml"
    child.write_text("version: 1\nextends: base.yaml\ndisk: {writers: 3}\n")
    with pytest.raises(ConfigError, match=r"base.yaml:2:17: error: disk.writers"):
        load_policy(str(child))


def test_extending_oneself_is_refused(tmp_path):
    """A cycle is named."""
    (tmp_path / "a.yaml").write_text("version: 1\nextends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("version: 1\nextends: a.yaml\n")
    with pytest.raises(ConfigError, match="extends itself"):
        load_policy(str(tmp_path / "a.yaml"))


def test_auto_takes_a_value_back():
    """A later layer may return a key to autockpt."""
    text = "version: 1\ndisk: {writers: 8}\n"
    assert parse_policy(text, settings=["disk.writers=auto"]).goal.pins.writers is None


@pytest.mark.parametrize(("world_size", "writers"), [(8, 4), (512, 32), (64, 8), (63, 4)])
def test_first_matching_override_is_applied(world_size, writers):
    """Comparisons on facts that the launcher knows."""
    text = """version: 1
disk: {writers: 4}
overrides:
  - when: {world_size: ">=512"}
    set: {disk: {writers: 32}}
  - when: {world_size: ">63", nodes: 2}
    set: {disk: {writers: 8}}
"""
    facts = {"world_size": world_size, "nodes": 2}
    assert parse_policy(text, facts=facts).goal.pins.writers == writers
    assert parse_policy(text).goal.pins.writers == 4


def test_options_beat_overrides():
    """--set is the last word."""
    text = 'version: 1\noverrides:\n  - when: {nodes: ">=1"}\n    set: {interval: 5 min}\n'
    policy = parse_policy(text, facts={"nodes": 1}, settings=["interval=7 min"])
    assert policy.goal.pins.disk_interval_s == 420.0


def test_a_missing_file_lists_what_there_is():
    """Typo in the path or the name of a preset."""
    with pytest.raises(ConfigError, match=r"give a file or one of .*builtin:auto"):
        load_policy("nowhere.yaml")
    with pytest.raises(ConfigError, match="did you mean 'checkfreq'"):
        load_policy("builtin:chekfreq")


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_loads_describes_itself_and_can_be_extended(name):
    """A preset is an ordinary policy file."""
    assert load_policy(f"builtin:{name}").goal.policy == f"builtin:{name}"
    assert len(presets()[name]) > 20
    assert not parse(preset_text(name), name).problems
    text = f"version: 1\nextends: builtin:{name}\nkeep: {{last: 9}}\n"
    assert parse_policy(text).goal.retention.keep_last == 9


def test_starter_file_is_auto_and_names_every_key():
    """init_text changes nothing and documents everything."""
    text = init_text()
    goal = parse_policy(text).goal
    assert goal.limits == Goal().limits
    assert goal.retention == Goal().retention
    written = {path for path, _ in parse(text, "starter.yaml").root.leaves()}
    assert written - {"version", "extends", "interval"} == set(KEYS.known) - {
        "interval",
        "disk.interval",
    }
    assert "interval" in written


def test_explain_lists_values_with_their_source():
    """Aligned, one line per key, or a part of them."""
    policy = parse_policy("version: 1\ndisk:\n  writers: 3\n", file="p.yaml")
    assert "disk.writers    3     p.yaml:3" in explain(policy, "disk")
    assert explain(policy, "disk.writers") == "disk.writers  3  p.yaml:3"
    assert len(explain(policy).splitlines()) == len(KEYS.rows)


@pytest.mark.parametrize(
    ("text", "value"), [("observe", "observe"), ("true", True), ("auto", None)]
)
def test_retune_may_observe_only(text, value):
    """Three answers and auto; the schema knows them."""
    assert parse_policy(f"version: 1\nretune: {text}\n").goal.pins.retune == value
    options = schema()["properties"]["retune"]["anyOf"]
    assert {"enum": ["auto", "observe"]} in options


def test_diff_names_the_keys_that_differ():
    """In the order of the schema."""
    a = parse_policy("version: 1\ninterval: 5 min\n")
    b = parse_policy("version: 1\nretune: false\n")
    assert [str(d) for d in diff(a, b)] == [
        "retune: auto -> false",
        "disk.interval: 5 min -> auto",
    ]


def test_the_schema_takes_the_rates_that_the_reader_takes():
    """Bytes, never bits."""
    rate = schema()["$defs"]["Remote"]["properties"]["rate"]
    (pattern,) = (option["pattern"] for option in rate["anyOf"] if "pattern" in option)
    assert re.fullmatch(pattern, "50 MB/s")
    assert not re.fullmatch(pattern, "50 Mb/s")
    with pytest.raises(ConfigError, match="bits or bytes"):
        parse_policy("version: 1\nremote: {rate: 50 Mb/s}\n")


def test_schema_gives_units_a_pattern():
    """An editor marks `15` and accepts `15 min`."""
    data = schema()
    json.dumps(data)
    found = data["properties"]["interval"]["anyOf"]
    patterns = [option["pattern"] for option in found if "pattern" in option]
    assert any(re.fullmatch(p, "15 min") for p in patterns)
    assert any(re.fullmatch(p, "500 steps") for p in patterns)
    assert not any(re.fullmatch(p, "15") for p in patterns)
    assert data["required"] == ["version"]
    assert data["additionalProperties"] is False
    assert data["properties"]["retune"]["default"] == "auto"


FULL = """
version: 1
interval: 500 steps
objective: durability
memory: {interval: 30 s, slots: 4, enabled: true}
disk: {path: /data/ckpt, writers: 8, chunk: 16 MiB, direct: false, codec: zstd,
       read_once: false}
staging: {schedule: blocking, persist: sync, streaming: false, preallocate: false, path: host,
          in_flight: 2, device_clone: on, shares: job}
redundancy: {scheme: rs, copies: 3, placement: ring, set_size: 4, parity: 2, path: host,
             rate: 1.3 GB/s, schedule: windows, floor: 1}
limits: {stall: 70 ms, host_memory: 64 GiB, overhead: 7 %, lost_time: 1 h 30 min, disk: 2 TB}
prices: {disk: 0.023 USD/GiB-month, node: 32 USD/h}
failures: {mtbf: 8 h, process_share: 40 %, preemption: 6 h, notice: 2 min, silent_latency: 12 h,
           stuck: restart, rollback: skip, replicas: restore, faulty_node: leave}
restart: {standby: off, last_boundary: on, caches: off}
keep: {last: 5, every: 6 h, ttl: 30 d, best: 2, metric: max accuracy, weights_only: true}
archive: {codec: excp, lossy: true, full_every: 4}
remote: {url: "file:///store/run", keep: 7, rate: 50 MB/s}
retune: observe
rule: checkfreq
"""


def test_the_full_text_leaves_no_key_out():
    """So that the next test is about all of them."""
    written = {value.path for value in parse_policy(FULL).values if value.source != "default"}
    assert written == set(KEYS.known) - {"interval"}


@pytest.mark.parametrize("text", [FULL, "version: 1", *(preset_text(name) for name in presets())])
def test_a_goal_takes_settings_as_its_file_did(text):
    """None, any, and back to auto: as if they had been given when the file was read."""
    goal = parse_policy(text).goal
    for settings in (
        [],
        ["keep.last=9", "disk.writers=1", "interval=7 min"],
        ["retune=false", "limits.stall=auto", "objective=stall", "remote.url=file:///else"],
        [
            f"{key}=auto"
            for key in KEYS.known
            if not key.startswith("archive.") and key != "interval"
        ],
    ):
        assert with_settings(goal, settings) == parse_policy(text, settings=settings).goal


@pytest.mark.parametrize("text", [FULL, *(preset_text(name) for name in presets())])
def test_what_makes_one_goal_of_another_can_be_written_down(text):
    """To the bit, as --set and as a file, both ways."""
    full, auto = parse_policy(text, file="one").goal, parse_policy("version: 1", file="one").goal
    odd = parse_policy(text, file="one", settings=ODD).goal
    for before, after in ((auto, full), (full, auto), (full, odd), (odd, auto)):
        settings = settings_between(before, after)
        assert with_settings(before, [f"{k}={v}" for k, v in settings.items()]) == after
        base = settings_between(auto, before)
        file = "\n".join(["version: 1", *as_yaml(base | settings)])
        assert parse_policy(file, file="one").goal == after
    assert settings_between(full, full) == {}
    assert settings_between(auto, parse_policy("version: 1\nlimits: {stall: 50 ms}").goal) == {
        "limits.stall": "50 ms"
    }


ODD = ["limits.stall=1.2345678901 ms", "limits.overhead=0.1 %", "limits.disk=1234567 B",
       'disk.path="/data: a #1"', "interval=333 steps", "redundancy.rate=1234567 B/s"]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["keep.lst=1"], "unknown field; did you mean 'keep.last'"),
        (["keep.last=0"], "--set keep.last=0: error: keep.last: expected"),
        (["archive.lossy=false"], "the goal of the run: error: archive.codec: excp loses"),
        (["failures.preemption=auto"], "failures.notice: says how long ahead"),
        (["prices.disk=1 EUR/GB-month"], "prices.node: in USD, and prices.disk is in EUR"),
        (["memory.enabled=false"], "memory.enabled is false, so no interval"),
        (["limits.stall=true"], "expected a quantity such as 200 ms, got true"),
    ],
)
def test_settings_that_do_not_fit_a_goal_are_refused(settings, message):
    """As in a file, one key against another as well."""
    with pytest.raises(ConfigError, match=message):
        with_settings(parse_policy(FULL).goal, settings)


def test_an_interval_beyond_the_work_that_may_be_lost_is_refused_in_the_file() -> None:
    """Without a profile; an interval in steps is judged with one."""
    text = "version: 1\ndisk: {interval: %s}\nlimits: {lost_time: 1 min}\n"
    with pytest.raises(ConfigError, match=r"f:2:18: error: disk.interval: 5 min .* nearest: .* 60"):
        parse_policy(text % "5 min", file="f")
    assert parse_policy(text % "50 s", file="f").goal.limits.lost_time_s == 60
    assert parse_policy(text % "9000 steps", file="f").goal.limits.lost_time_s == 60


def test_the_environment_alone_makes_a_goal_where_it_has_a_key() -> None:
    """Variables of other parts make none."""
    assert goal_of_environment({"AUTOCKPT_DEBUG": "1", "AUTOCKPT_NODE": "2"}) is None
    goal = goal_of_environment({"AUTOCKPT_DISK_PATH": "s3://bucket/run", "AUTOCKPT_DEBUG": "1"})
    assert goal is not None
    assert goal.storage_path == "s3://bucket/run"
    later = goal_of_environment({"AUTOCKPT_KEEP_LAST": "7"}, goal)
    assert later is not None
    assert (later.storage_path, later.retention.keep_last) == ("s3://bucket/run", 7)
    with pytest.raises(ConfigError, match="AUTOCKPT_DISK_INTERVAL=7 stps: error"):
        goal_of_environment({"AUTOCKPT_DISK_INTERVAL": "7 stps"})
