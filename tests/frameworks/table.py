"""Its own resume / with autockpt: killed once, is the end that of an undisturbed run?

    python -m tests.frameworks.table huggingface      prints the table of docs/frameworks/

Each cell is a run: "exact" says that the bytes of the end and the samples of every micro-batch
equal those of the bare framework; else the cell says what differs first.
"""

import sys
import tempfile
from collections.abc import Callable

from tests.contracts.adapter_contract import (
    Framework,
    Outcome,
    bare,
    own,
    protected,
    require_equal,
)
from tests.contracts.adapter_process import Case

PACKAGES = {
    "huggingface": "transformers", "accelerate": "accelerate", "deepspeed": "deepspeed",
    "torchtitan": "torchtitan",
}  # fmt: skip
ROWS = {
    "killed in an epoch": Case(kill="forward:10"),
    "the data set draws random numbers": Case(kill="forward:10", draws=True),
    "gradients accumulated over 4 batches": Case(kill="forward:21", accumulation=4),
    "evaluation every 3 steps": Case(kill="forward:10", evaluate_every=3),
    "2 worker processes": Case(kill="forward:10", workers=2),
}


def main(name: str) -> None:
    """Prints the table of one framework."""
    framework = Framework(name, f"tests/frameworks/{name}_driver.py", PACKAGES[name])
    if framework.missing:
        sys.exit(framework.missing)
    print("| | its own resume | with autockpt |\n|---|---|---|")
    for row, case in ROWS.items():
        cells = [_cell(framework, case, how) for how in (own, protected)]
        print(f"| {row} | {' | '.join(cells)} |", flush=True)


def _cell(framework: Framework, case: Case, run: Callable[[Framework, Case, str], Outcome]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome = run(framework, case, folder)
        except AssertionError as error:
            return f"ends with an error: {str(error).strip().splitlines()[-1]:.80}"
    undisturbed = bare(framework, case.undisturbed)
    try:
        require_equal(outcome, undisturbed)
    except AssertionError:
        return _difference(outcome, undisturbed)
    return "exact"


def _difference(outcome: Outcome, undisturbed: Outcome) -> str:
    other = [
        number
        for (rank, number), attempts in outcome.samples.items()
        if any([ids] != undisturbed.samples.get((rank, number)) for ids in attempts)
    ]
    if other:
        return f"{len(other)} batches of other samples"
    parts = outcome.ends["0"].keys() | undisturbed.ends["0"].keys()
    differ = [p for p in parts if outcome.ends["0"].get(p) != undisturbed.ends["0"].get(p)]
    return f"differs: {', '.join(sorted(differ))}"


if __name__ == "__main__":
    main(sys.argv[1])
