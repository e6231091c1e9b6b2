"""Warnings are told once, those of one kind together."""

from autockpt.reports.remarks import grouped


def test_warnings_with_equal_advice_are_one_with_their_number() -> None:
    """In their order; a warning alone stays as it is."""
    said = grouped(
        (
            "snapshot time: spans 1.6 times of the median; rerun it",
            "storage writes were not measured: chunks are defaults",
            "the disk is slow",
            "persist time: spans 2 times of the median; rerun it",
            "the disk is slow",
            "host copy was not measured: the stall is assumed",
        )
    )
    assert said == (
        "2 times: rerun it. It concerns snapshot time: spans 1.6 times of the median; "
        "persist time: spans 2 times of the median",
        "2 quantities were not measured: storage writes (chunks are defaults); "
        "host copy (the stall is assumed)",
        "the disk is slow",
    )


def test_a_warning_alone_is_not_rewritten() -> None:
    """Its advice stays where it was."""
    assert grouped(("snapshot time: unsteady; rerun it",)) == ("snapshot time: unsteady; rerun it",)
