"""Failure domains from what clusters say about themselves."""

from pathlib import Path

import pytest

from autockpt.profiles import domains
from autockpt.profiling.facts.failure_domains import domains_of, job_domains, own_labels
from autockpt.values.errors import ConfigError
from autockpt.values.placement import UNKNOWN_DOMAINS, FailureDomains

NODES = ("n01", "n02", "n03", "n04")
EXPECTED = FailureDomains(
    levels=("power", "rack"), labels=(("p1", "a"), ("p1", "a"), ("p1", "b"), ("p2", "c"))
)
TABLES = {
    "domains.csv": '# where\nnode,power,rack\n"n[01-02]",p1,a\nn03, p1, b\nn04,p2,c\nspare,p2,c\n',
    "domains.yaml": (
        "n[01-02]: {power: p1, rack: a}\nn03: {power: p1, rack: b}\nn04: {power: p2, rack: c}\n"
    ),
}

TREE = """
# two leaves under one core switch, and one beside it
SwitchName=core Switches=leaf[1-2] LinkSpeed=100
SwitchName=leaf1 Nodes=n[01-02]
SwitchName=leaf2 Nodes=n03
switchname=far Nodes=n04
"""


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_all_nodes_is_read(tmp_path: Path, name: str) -> None:
    """CSV and YAML, with lists of nodes; host names may be full."""
    path = tmp_path / name
    path.write_text(TABLES[name])
    environment = {"AUTOCKPT_DOMAINS": str(path)}
    assert domains_of(NODES, environment) == EXPECTED
    assert domains_of([f"{node}.cluster.example" for node in NODES], environment) == EXPECTED
    assert own_labels(environment) == {}


def test_slurm_s_tree_gives_the_switches_above_a_node(tmp_path: Path) -> None:
    """Leaves have height 1; a level that some node lacks is left out."""
    path = tmp_path / "topology.conf"
    path.write_text(TREE)
    found = domains_of(NODES[:3], {"AUTOCKPT_DOMAINS": str(path)})
    assert found is not None
    assert found.levels == ("switch2", "switch1")
    assert found.labels == (("core", "leaf1"), ("core", "leaf1"), ("core", "leaf2"))
    uneven = domains_of(NODES, {"AUTOCKPT_DOMAINS": str(path)})
    assert uneven is not None
    assert uneven.labels == (("leaf1",), ("leaf1",), ("leaf2",), ("far",))


def test_slurm_s_blocks_are_a_level() -> None:
    """topology/block."""
    text = "BlockName=b1 Nodes=n[01-02]\nBlockName=b2 Nodes=n[03-04]\nBlockSizes=2,4\n"
    table = domains.from_topology_conf(text, where="topology.conf")
    assert domains.of_nodes(NODES, table, where="it").labels == (("b1",), ("b1",), ("b2",), ("b2",))


def test_a_node_knows_its_switches_from_slurm_or_a_variable() -> None:
    """SLURM_TOPOLOGY_ADDR under topology/tree, nothing without a plugin, the variable first."""
    slurm = {
        "SLURM_TOPOLOGY_ADDR": "core1.leaf3.node17",
        "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
    }
    assert own_labels(slurm) == {"switch2": "core1", "switch1": "leaf3"}
    none = {"SLURM_TOPOLOGY_ADDR": "node17", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}
    assert own_labels(none) == own_labels({}) == {}
    said = own_labels({**slurm, "AUTOCKPT_DOMAINS": "power=p1, rack=r7"})
    assert said == {"power": "p1", "rack": "r7"}
    assert domains_of(NODES, {"AUTOCKPT_DOMAINS": "rack=r7"}) is None


def test_nodes_that_know_nothing_have_unknown_domains() -> None:
    """One of them is enough: a level counts only where all have it."""
    joined = FailureDomains.joined
    assert joined([]) == joined([{"rack": "a"}, {}]) == UNKNOWN_DOMAINS
    assert joined([{"rack": "a"}, {"rack": "b"}]).labels == (("a",), ("b",))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("d.csv", "", "expected the header node,LEVEL"),
        ("d.csv", "node,rack\nn01\n", "d.csv:2: 1 cells, expected 2: node,rack"),
        ("d.csv", "node,rack\nn01,a\nn01,b\n", "d.csv:3: node n01 stands twice"),
        ("d.csv", 'node,rack\n"n[1-",a\n', "d.csv:2: node list"),
        ("d.csv", "node,rack\nn01,a\n", "no failure domain of n02, n03, n04; the file names 1"),
        ("d.yaml", "n01: a\n", "expected nodes with their domains"),
        ("d.yaml", "{", "not valid YAML"),
        ("d.yaml", "n01: {rack: 2024-13-99}", "not valid YAML: month must be in 1..12"),
        ("d.yaml", "n01: " + "[" * 3000, "not valid YAML: brackets are nested deeper than 100"),
        ("d.yaml", "- " * 3000, "not valid YAML: nested too deeply"),
        ("t.conf", "# nothing\n", "no line SwitchName="),
        ("t.conf", "SwitchName=a Switches=b\nSwitchName=b Switches=a Nodes=n01\n", "above itself"),
    ],
)
def test_what_is_wrong_in_a_table_is_said_with_its_place(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    """File, line, what was expected."""
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        domains_of(NODES, {"AUTOCKPT_DOMAINS": str(path)})


def test_a_slurm_job_s_nodes_are_found_in_the_table(tmp_path: Path) -> None:
    """By the job's node list; what is wrong is said, and the training goes on without."""
    path = tmp_path / "domains.csv"
    path.write_text(TABLES["domains.csv"])
    slurm = {"SLURM_JOB_NODELIST": "n[01-04]", "AUTOCKPT_DOMAINS": str(path)}
    assert job_domains(slurm, 4) == (EXPECTED, ())
    assert job_domains({}, 4) == job_domains(slurm, 3) == (UNKNOWN_DOMAINS, ())
    for wrong in ({"AUTOCKPT_DOMAINS": "gone.csv"}, {"SLURM_JOB_NODELIST": "n[01-"}):
        domains_found, warnings = job_domains({**slurm, **wrong}, 4)
        assert domains_found == UNKNOWN_DOMAINS
        assert warnings[0].startswith("failure domains are not known: ")


def test_a_variable_that_is_neither_file_nor_labels_is_refused(tmp_path: Path) -> None:
    """A missing file and labels without a level."""
    with pytest.raises(ConfigError, match="cannot be read"):
        domains_of(NODES, {"AUTOCKPT_DOMAINS": str(tmp_path / "gone.csv")})
    for text in ("=r7", "rack=", "rack=a,rack=b", "rack=a,b=,"):
        with pytest.raises(ConfigError, match=r"failure domains .*: expected"):
            own_labels({"AUTOCKPT_DOMAINS": text})
