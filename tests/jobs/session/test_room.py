"""Room on the disk is compared with the plan before the first checkpoint is written."""

from pathlib import Path

import pytest

from autockpt.session import room


def test_a_plan_that_fits_says_nothing() -> None:
    """What is stored already gives way to what comes."""
    assert room.shortage("d", free_bytes=10, stored_bytes=30, state_bytes=10, kept=3) == ""


def test_a_plan_that_does_not_fit_says_what_is_missing() -> None:
    """In bytes, and what to do."""
    said = room.shortage(
        "/disk", free_bytes=20 * 10**9, stored_bytes=0, state_bytes=10 * 10**9, kept=3
    )
    assert said.startswith("/disk: 20 GB free")
    assert "expected 40 GB for 3 checkpoints of 10 GB" in said
    assert "keep.last" in said


def test_it_looks_at_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only generations count as stored."""
    for name in ("gen-e000001-s000000001", "spare"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(bytes(1000))
    seen: list[int] = []

    def shortage(path: str, **bytes_: int) -> str:
        seen.append(bytes_["stored_bytes"])
        return "too small"

    monkeypatch.setattr(room, "shortage", shortage)
    said: list[str] = []
    room.look_for_room(str(tmp_path), state_bytes=1, kept=1, say=said.append).join(60)
    assert (seen, said) == ([1000], ["too small"])


def test_a_directory_that_is_gone_is_no_error(tmp_path: Path) -> None:
    """Its first save says it."""
    said: list[str] = []
    room.look_for_room(str(tmp_path / "no"), state_bytes=1, kept=1, say=said.append).join(60)
    assert said == []
