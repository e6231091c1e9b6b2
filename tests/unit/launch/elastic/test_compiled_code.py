"""Where ranks keep compiled code: in the run, by kind of machine, where the user names no place."""

from pathlib import Path

from autockpt.launch.elastic.compiled_code import (
    FOLDERS,
    cache_variables,
    chosen,
    machine_kind,
    may_move,
)

CORE = (
    "processor\t: 0\nmodel name\t: {model}\ncpu MHz\t\t: {mhz}\nflags\t\t: fpu {flags}\n\n"
    "processor\t: 1\n"
)


def machine(folder: Path, *, model: str = "A", flags: str = "avx2", mhz: str = "2000.0") -> Path:
    """What the kernel says of a machine."""
    path = folder / f"{model}-{flags}-{mhz}"
    path.write_text(CORE.format(model=model, flags=flags, mhz=mhz))
    return path


def test_every_cache_lies_in_the_run(tmp_path: Path) -> None:
    """Each in a folder of its own."""
    found = cache_variables(tmp_path / "caches", {})
    assert found.keys() == FOLDERS.keys()
    assert len(set(found.values())) == len(FOLDERS)
    assert all(Path(path).is_relative_to(tmp_path / "caches") for path in found.values())


def test_extensions_stay_where_torch_builds_them(tmp_path: Path) -> None:
    """A rank killed within a build leaves its lock, for which every later start would wait."""
    assert "TORCH_EXTENSIONS_DIR" not in cache_variables(tmp_path, {})


def test_a_policy_has_the_last_word(tmp_path: Path) -> None:
    """`auto`: where a restart may be on another machine."""
    slurm = {"SLURM_JOB_ID": "7"}
    assert chosen("on", tmp_path, {}, single_node=True).keys() == FOLDERS.keys()
    assert chosen("off", tmp_path, slurm, single_node=False) == {}
    assert chosen(None, tmp_path, {}, single_node=True) == {}
    assert chosen(None, tmp_path, slurm, single_node=True).keys() == FOLDERS.keys()


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    """An empty variable counts as none."""
    found = cache_variables(tmp_path, {"TRITON_CACHE_DIR": "/mine", "CUDA_CACHE_PATH": ""})
    assert "TRITON_CACHE_DIR" not in found
    assert "CUDA_CACHE_PATH" in found


def test_only_the_kind_of_machine_counts(tmp_path: Path) -> None:
    """Code with instructions of one processor is never offered to another one."""
    kind = machine_kind(machine(tmp_path))
    assert kind == machine_kind(machine(tmp_path, mhz="3100.5"))
    assert kind != machine_kind(machine(tmp_path, flags="avx512f"))
    assert kind != machine_kind(machine(tmp_path, model="B"))
    assert "/" not in kind


def test_a_machine_without_that_file_has_a_kind_too(tmp_path: Path) -> None:
    """As on systems that have no /proc."""
    assert machine_kind(tmp_path / "none") == machine_kind(tmp_path / "none")


def test_one_machine_keeps_the_places_that_all_runs_share() -> None:
    """A restart on another one is what they do not outlast."""
    assert not may_move({}, single_node=True)
    assert may_move({}, single_node=False)
    assert may_move({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, single_node=True)
    assert may_move({"SLURM_JOB_ID": "7"}, single_node=True)
