"""The time in which bytes move, without the pauses between them."""

from autockpt.executors.keeper.replication.link_meter import LinkMeter


def test_pauses_do_not_count_and_what_overlaps_counts_once() -> None:
    """Two chunks of three seconds that share two of them, a pause, and one that broke."""
    now = [0.0]
    meter = LinkMeter(lambda: now[0])
    meter.begin()
    now[0] = 1.0
    meter.begin()
    now[0] = 3.0
    meter.end(100)
    now[0] = 4.0
    meter.end(100)
    now[0] = 50.0
    meter.begin()
    now[0] = 50.5
    meter.end(0)
    assert meter.take() == (200, 4.5)
    assert meter.take() == (0, 0.0)


def test_what_is_coming_is_split_between_two_questions() -> None:
    """Nothing is counted twice."""
    now = [0.0]
    meter = LinkMeter(lambda: now[0])
    meter.begin()
    now[0] = 2.0
    assert meter.take() == (0, 2.0)
    now[0] = 5.0
    meter.end(10)
    assert meter.take() == (10, 3.0)
