"""Its own resume / with autockpt: killed once, what is as in an undisturbed run?

`make test-frameworks` measures it, RESULTS keeps it, and `make docs` puts tables into the pages.
Digests are taken in front of the first micro-batch that the second start trains, and at the end.
"""

import importlib.metadata
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.contracts.adapter_contract import (
    Framework,
    Outcome,
    bare,
    own,
    protected,
    require_equal,
)
from tests.contracts.adapter_process import Case

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "resumes.json"
DISTRIBUTIONS = {"ignite": "pytorch-ignite"}
PARTS = {
    "model": "parameters", "masters": "fp32 copies of the parameters", "optimizer": "optimizer",
    "scheduler": "scheduler", "scaler": "loss scale", "random": "random numbers",
    "step": "phase of the accumulation", "state": "`TrainerState`",
}  # fmt: skip
"""Named in this order; others by their own names behind."""
KILLED = 10
SETTINGS = {
    "draws": ("the data set draws random numbers", Case(kill=f"forward:{KILLED}", draws=True)),
    "accumulation": (
        "gradients of 4 batches, killed in batch 21",
        Case(kill="forward:21", accumulation=4),
    ),
    "evaluation": ("evaluation every 3 steps", Case(kill=f"forward:{KILLED}", evaluate_every=3)),
    "workers": ("2 worker processes", Case(kill=f"forward:{KILLED}", workers=2)),
}


def measured(framework: Framework) -> dict[str, Any]:
    """What RESULTS holds of one framework: {version, killed, torch, rows}."""
    case = Case(kill=f"forward:{KILLED}")
    columns = [_parts(framework, case, run) for run in (own, protected)]
    names = [name for name in (*PARTS, *columns[1]) if name in columns[1]]
    rows = [[PARTS.get(name, name), *(column.get(name, "") for column in columns)]
            for name in dict.fromkeys(names)]  # fmt: skip
    for what, other in SETTINGS.values():
        ends = [_parts(framework, other, run)["the whole training"] for run in (own, protected)]
        rows.append([f"the same, and {what}", *ends])
    version = importlib.metadata.version(DISTRIBUTIONS.get(framework.package, framework.package))
    torch = importlib.metadata.version("torch")
    return {"version": version, "killed": KILLED, "torch": torch, "rows": rows}


def keep(framework: Framework, result: dict[str, Any]) -> None:
    """Puts it into RESULTS, under the name of the driver."""
    results = json.loads(RESULTS.read_text("utf-8"))
    results[Path(framework.driver).stem.removesuffix("_driver")] = result
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _parts(
    framework: Framework, case: Case, run: Callable[[Framework, Case, str], Outcome]
) -> Mapping[str, str]:
    """By part "exact" or what differs."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome = run(framework, case, folder)
        except AssertionError as error:
            said = f"ends with an error: {str(error).strip().splitlines()[-1]:.80}"
            return {"the whole training": said}
    undisturbed = bare(framework, case.undisturbed)
    resumed = outcome.attempts["0"][-1]
    first = min(resumed)
    expected = undisturbed.attempts["0"][0]
    same = {
        part: "exact" if digest == expected[first].get(part) else "differs"
        for part, digest in resumed[first].items()
    }
    others = sum(
        outcome.samples["0", number][-1:] != undisturbed.samples.get(("0", number))
        for number in resumed
    )
    killed = int(case.kill.partition(":")[2])
    return {
        "batches trained twice": str(killed + 1 - first),
        **same,
        "samples": f"{others} of {len(resumed)} batches have others" if others else "exact",
        "the whole training": _whole(outcome, undisturbed),
    }


def _whole(outcome: Outcome, undisturbed: Outcome) -> str:
    try:
        require_equal(outcome, undisturbed)
    except AssertionError:
        ours, theirs = outcome.ends["0"], undisturbed.ends["0"]
        differ = [PARTS.get(p, p) for p in theirs if ours.get(p) != theirs[p]]
        return f"differs at the end: {', '.join(differ)}" if differ else "other samples"
    return "exact"
