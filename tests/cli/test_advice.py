"""The two lines carry the script's own names."""

from pathlib import Path

import pytest

from autockpt.cli.advice import GENERIC, advice, lines_to_add


@pytest.mark.parametrize(
    ("source", "attach", "loop"),
    [
        pytest.param(
            """
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=1)
sched = torch.optim.lr_scheduler.StepLR(opt, 10)
train = DataLoader(data)
for epoch in range(args.epochs):
    for i, (x, y) in enumerate(train):
        opt.step()
""",
            "ckpt = autockpt.attach(model=net, optimizer=opt, scheduler=sched, data=train)",
            "for step, (x, y) in ckpt.batches(args.epochs * len(train)):",
            id="epochs and enumerate",
        ),
        pytest.param(
            """
opt = AdamW(params=self.model.parameters())
for batch in loader:
    opt.step()
""",
            "ckpt = autockpt.attach(model=self.model, optimizer=opt)",
            "for step, batch in ckpt.batches(len(loader)):",
            id="one pass",
        ),
        pytest.param(
            """
def main():
    opt = torch.optim.Adam(net.parameters())
    for step in range(0, args.steps):
        for micro in range(4):
            loss.backward()
        opt.step()
""",
            "ckpt = autockpt.attach(model=net, optimizer=opt)",
            "for step in ckpt.steps(args.steps):",
            id="own batches, with accumulation",
        ),
        pytest.param("while True:\n    pass\n", GENERIC.attach, GENERIC.loop, id="nothing known"),
        pytest.param("x = (", GENERIC.attach, GENERIC.loop, id="not Python"),
    ],
)
def test_lines(source: str, attach: str, loop: str) -> None:
    """Recognised from the syntax tree; otherwise the usual names."""
    found = lines_to_add(source)
    assert (found.attach, found.loop) == (attach, loop)


def test_the_example_gets_its_own_lines() -> None:
    """The untouched example, as `autockpt run` would print it."""
    root = Path(__file__).resolve().parents[2]
    text = advice(str(root / "examples" / "untouched" / "train.py"))
    assert "UNPROTECTED: train.py" in text
    assert "instead of: for " in text
    assert "before the loop in line" in text


def test_a_file_that_is_gone_still_gets_advice() -> None:
    """The generic lines."""
    assert GENERIC.attach in advice("nowhere.py")
