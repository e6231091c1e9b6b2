"""Text, CSV, JSON, Prometheus and redaction: the same report in other clothes."""

import dataclasses
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.reports.formats import frames
from autockpt.reports.formats.renderers import RENDERERS, report
from autockpt.reports.formats.text import WIDTH
from autockpt.reports.model import build
from autockpt.reports.redact import redact
from autockpt.values.errors import ConfigError
from autockpt.values.telemetry import EVENTS, Degraded, Event, FailureObserved, columns
from tests.unit.reports.analysis.test_accounting import any_event
from tests.unit.reports.examples import profile_data, run_data, run_events, unprotected_data

GOLDEN = """\
autockpt run: train.py

!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!
UNPROTECTED: the script ran unchanged and was not checkpointed. The lines to add, with
the usual names (autockpt run ends by printing them with the script's own):

    import autockpt
    ckpt = autockpt.attach(model=model, optimizer=optimizer, data=loader)
    for step, batch in ckpt.batches(total_steps):  # no DataLoader: ckpt.steps(total_steps)
!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!

=> Finished at step 9000. 60 min 1 s were trained unprotected.
   Lost: No checkpoint was taken, because the script never attached. A failure would
   have cost all of the run.
   Next: Add the lines that autockpt run printed; then start it again.
   Confidence: high (the times above are measured).

  At stake     60 min 1 s  all of the run
  Checkpoints  none        the script never attached
  Steps        9000

$ autockpt run train.py
ended finished, run plain, ranks 1

Where time went
  training that counts            ############################  99.7 %   59 min 50 s
  checkpoint stall                ............................  0 %      0 us
  slow-down while writing         ............................  0 %      0 us
  lost work                       ............................  0 %      0 us
  down: detect, restart, restore  ............................  0 %      0 us
  other: start-up, unexplained    ............................  0.305 %  11 s

Findings
  [high] Nothing was checkpointed (unprotected)
    the script never called autockpt.attach; 60 min 1 s of training were at stake in a
    failure
    do: add the lines that autockpt run printed; the top of this report shows their form
  2 checks passed
"""


def test_the_text_report_of_a_small_run_is_this() -> None:
    """Word for word, so that a change is a decision."""
    assert report(unprotected_data(), format_="text") == GOLDEN


@pytest.mark.parametrize("data", [profile_data(), run_data()], ids=["profile", "run"])
def test_the_text_report_fits_the_terminal_and_starts_with_the_verdict(data: object) -> None:
    """At most 88 columns; the verdict stands before any table."""
    text = report(data, format_="text")  # type: ignore[arg-type]
    lines = text.splitlines()

    assert max(map(len, lines)) <= WIDTH
    assert text.isascii()
    assert next(i for i, line in enumerate(lines) if line.startswith("=>")) < 8


def test_text_and_page_tell_the_same() -> None:
    """Verdict and tiles are one model."""
    data = run_data()
    text, page = report(data, format_="text"), report(data, format_="html").replace("\u00a0", " ")

    for tile in build(data).tiles:
        assert tile.value in text
        assert tile.value in page


def test_terminal_escapes_do_not_reach_the_terminal() -> None:
    """A reason cannot clear the screen or write to the clipboard."""
    events = (*run_events(total=720), Degraded(at_s=5100.0, rank=0, what="\x1b]52;c;AA\x07",
                                               reason="\x1b[2J"))  # fmt: skip
    text = report(dataclasses.replace(run_data(), events=events), format_="text")

    assert "\x1b" not in text
    assert "\x07" not in text


def test_csv_has_every_column_and_every_event_comes_back() -> None:
    """Events -> CSV -> events, to the last digit."""
    events = run_events(total=2880)
    text = frames.to_csv(events)

    assert text.splitlines()[0] == ",".join(columns())
    assert frames.from_csv(text) == tuple(events)


@pytest.mark.parametrize("kind", EVENTS.values(), ids=EVENTS)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_every_kind_of_event_comes_back(kind: type[Event], data: st.DataObject) -> None:
    """Whatever types its fields have."""
    events = (data.draw(any_event(kind)),)
    assert frames.from_csv(frames.to_csv(events)) == events


@given(
    st.lists(
        st.builds(
            FailureObserved,
            at_s=st.floats(allow_nan=False, allow_infinity=False),
            rank=st.integers(-1, 100),
            what=st.text(st.characters(codec="utf-8", exclude_characters="\r\x00")),
            failed_rank=st.integers(-1, 10**6),
            pid=st.integers(0, 2**31),
            step=st.integers(0, 2**53 - 1),
            detail=st.sampled_from(["=1+1", "+A1", "-2", "@SUM(A1)", "'x", "", 'a"b,c\nd', "NA"]),
        ),
        max_size=5,
    )
)
@settings(max_examples=60, deadline=None)
def test_csv_keeps_any_text_and_hides_formulas(events: list[Event]) -> None:
    """Texts that a spreadsheet would run are quoted, and come back unquoted."""
    text = frames.to_csv(events)

    assert frames.from_csv(text) == tuple(events)
    for cell in re.findall(r"(?:^|,)([=+@][^,\n]*)", text, re.M):
        assert not cell, "a formula reached the file"


def test_a_table_has_one_row_per_event_and_numbers_in_their_types() -> None:
    """Usable at once: sums and means need no cleaning."""
    events = run_events(total=720)
    frame = frames.telemetry_frame(events)

    assert len(frame) == len(events)
    assert tuple(frame.columns) == columns()
    assert str(frame["step"].dtype) == "Int64"
    assert frame.loc[frame["event"] == "IterationsTimed", "total_s"].sum() > 0
    assert frames.summary(events).loc["IterationsTimed", "count"] == 80


def test_a_foreign_csv_is_refused() -> None:
    """Another header is another format."""
    with pytest.raises(ConfigError, match="are not telemetry fields"):
        frames.from_csv("a,b\n1,2\n")


def test_prometheus_text_is_well_formed() -> None:
    """HELP and TYPE once per metric, before its samples; every line parses."""
    title = 'a "b" \\ c\nd'
    text = report(dataclasses.replace(run_data(), title=title), format_="prometheus")

    sample = re.compile(r'autockpt_\w+\{(\w+="(?:[^"\\\n]|\\.)*",?)+\} [-+.\dEeInf]+')
    declared: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            name = line.split()[2]
            assert name not in declared
            declared.add(name)
        elif not line.startswith("#"):
            assert sample.fullmatch(line), line
            assert line.split("{")[0] in declared
    assert 'autockpt_restores_total{run="a \\"b\\" \\\\ c\\nd",source="disk"} 1.0' in text
    assert 'autockpt_time_seconds{run="a \\"b\\" \\\\ c\\nd",purpose="down"} 115.2' in text


def test_json_carries_its_version() -> None:
    """The first thing a program checks."""
    assert json.loads(report(run_data(), format_="json"))["schema_version"] == 1


def test_redaction_leaves_no_path_and_no_host_anywhere() -> None:
    """Command, arguments, policy, reasons, fingerprint: nothing in any format names them."""
    secrets = ["/mnt/secret/ckpt", "s3://bucket-x/run-7", "trainer-17.corp", "10.1.2.3", "gpu-box",
               "../private/data.bin", "bob@gpu-box", "~bob/models"]  # fmt: skip
    told = "; ".join(f"failed at {secret}" for secret in secrets)
    data = run_data(total=720)
    assert data.profile is not None
    mark = dataclasses.replace(data.profile.fingerprint, storage="ext4 on /mnt/secret/ckpt")
    dirty = dataclasses.replace(
        data,
        hosts=("gpu-box",),
        command=f"autockpt run jobs/secret.py --out={secrets[0]} {' '.join(secrets)}",
        argv=("jobs/secret.py", *secrets),
        plan_yaml=f"storage: {{path: {secrets[1]}}}\n",
        profile=dataclasses.replace(data.profile, fingerprint=mark, warnings=(told,)),
        events=(*data.events, Degraded(at_s=5100.0, rank=0, what="store", reason=told)),
        status={"path": secrets[0]},
    )

    for name in RENDERERS:
        text = report(dirty, format_=name, redacted=True)
        for secret in (*secrets, "jobs/secret.py"):
            assert secret not in text, (name, secret)
    cleaned = redact(dirty)
    assert cleaned.profile is not None
    assert re.fullmatch(r"ext4 on \[path-\d+\]", cleaned.profile.fingerprint.storage)


def test_redaction_keeps_what_is_no_path() -> None:
    """Rates, shares and alternatives stay readable."""
    text = "0.5 GB/s, memory/disk, 30 h and/or 2.13.0 at 04:10:00, 12 %"
    data = dataclasses.replace(profile_data(), plan_yaml=text)

    assert redact(data).plan_yaml == text


def test_an_unknown_format_lists_the_known_ones() -> None:
    """And guesses what was meant."""
    with pytest.raises(ConfigError, match=r"known: html, text, json, csv.*did you mean html"):
        report(run_data(), format_="htm")
