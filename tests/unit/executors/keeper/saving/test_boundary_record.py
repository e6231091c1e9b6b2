"""Records of boundaries: whole or not there, whatever instant their process dies at."""

from autockpt.executors.keeper.saving import boundary_record as records
from autockpt.executors.linux.memory import Arena
from autockpt.values.generation import Generation


def head(step: int, *, ranges: int = 1) -> records.RecordHead:
    """Of a small image."""
    return records.RecordHead(
        generation=Generation(term=2, step=step, attempt=1), image_bytes=3 * 4096,
        boundary_end=4096, layout_digest="ab", replicas="cd",
        own_ranges=tuple((8192 + 16 * at, 8192 + 16 * at + 4) for at in range(ranges)),
    )  # fmt: skip


def record() -> Arena:
    """Empty."""
    return Arena.create_sparse(records.record_bytes(3 * 4096), name="record")


def test_a_record_is_read_as_it_was_written() -> None:
    """All of its head."""
    arena = record()
    assert records.read_head(arena) is None
    assert records.write_head(arena, head(5))
    assert records.read_head(arena) == head(5)
    arena.close()


def test_a_record_under_way_leaves_the_one_before() -> None:
    """Its process may be killed between any two stores."""
    first, second = record(), record()
    records.write_head(first, head(5))
    records.write_head(second, head(6))
    assert set(records.whole_records([first, second])) == {head(5).generation, head(6).generation}
    records.clear_head(first)
    assert set(records.whole_records([first, second])) == {head(6).generation}
    first.close()
    second.close()


def test_a_head_that_is_too_long_is_no_record() -> None:
    """Thousands of scattered tensors: such a job goes back to its newest checkpoint."""
    arena = record()
    assert not records.write_head(arena, head(5, ranges=10_000))
    assert records.read_head(arena) is None
    arena.close()


def test_only_what_is_recorded_is_copied_into_a_slot() -> None:
    """The rest of the slot is for a rank that holds it."""
    arena, slot = record(), Arena.create_shared(3 * 4096, name="slot")
    arena.view[:4096] = b"b" * 4096
    arena.view[8192:8196] = b"step"
    records.fill_slot(slot, head(5), arena)
    assert bytes(slot.view[:4096]) == b"b" * 4096
    assert bytes(slot.view[4096:8192]) == bytes(4096)
    assert bytes(slot.view[8192:8200]) == b"step" + bytes(4)
    arena.close()
    slot.close()
