"""What is printed to be pasted runs in the script that it is printed for, and changes no number."""

from pathlib import Path
from typing import Any

import pytest
import torch

import autockpt
from autockpt.cli.jobs.script_hints import EXAMPLE, Advice, advice, lines_to_add
from autockpt.executors.state.live_state import LiveState
from autockpt.profiling.pass_through import PassThroughSession

ROOT = Path(__file__).resolve().parents[4]

HEAD = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
def tqdm(over, **_): return over
def trange(*given, **_): return range(*given)
rows = TensorDataset(torch.arange(12.0).reshape(6, 2) / 12, torch.ones(6, 1))
net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
"""
OPT = """
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
"""
UPDATE = """opt.zero_grad(); torch.nn.functional.mse_loss(net(x), y).backward(); opt.step()"""

SHAPES = {
    "epochs and enumerate": (
        HEAD + OPT + f"""
loader, valid = None, DataLoader(rows)
train = DataLoader(rows, batch_size=2, shuffle=True)
sched = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
for epoch in range(1, 3 + 1):
    net.train()
    for i, (x, y) in enumerate(tqdm(train)):
        {UPDATE}
        assert i < 3
    sched.step()
    print(epoch)
""",
        [
            "ckpt = autockpt.attach(model=net, optimizer=opt, scheduler=sched, data=train)",
            "for epoch in range(1 + ckpt.step_count // len(train), 3 + 1):",
            "for step, (x, y) in ckpt.batches(len(range(1, 3 + 1)) * len(train), "
            "until=epoch * len(train)):",
        ],
    ),
    "epochs that do nothing else": (
        HEAD + OPT + f"""
train = DataLoader(rows, batch_size=2, shuffle=True)
for epoch in range(2 + 1):
    for x, y in train:
        {UPDATE}
""",
        [
            "ckpt = autockpt.attach(model=net, optimizer=opt, data=train)",
            "for step, (x, y) in ckpt.batches((2 + 1) * len(train)):",
        ],
    ),
    "one pass behind a bar": (
        HEAD + OPT + f"""
train = DataLoader(rows, batch_size=2)
bar = tqdm(train)
for step, batch in enumerate(bar):
    x, y = batch
    {UPDATE}
    print(step)
""",
        [
            "ckpt = autockpt.attach(model=net, optimizer=opt, data=train)",
            "for step_of_run, batch in ckpt.batches(len(train)):",
            "step = step_of_run % len(train)",
        ],
    ),
    "own batches, with accumulation": (
        HEAD + OPT + """
def main():
    for step in trange(4, desc="x"):
        opt.zero_grad()
        for micro in range(2):
            net(torch.rand(2, 2)).sum().backward()
        opt.step()
main()
""",
        [
            "ckpt = autockpt.attach(model=net, optimizer=opt)",
            "for step in ckpt.steps(4):",
        ],
    ),
    "batches by next": (
        HEAD + OPT + f"""
train = DataLoader(rows, batch_size=2, shuffle=True)
it = iter(train)
for step in range(3):
    x, y = next(it)
    {UPDATE}
""",
        [
            "ckpt = autockpt.attach(model=net, optimizer=opt, data=train)",
            "for step, batch in ckpt.batches(3):",
            "(x, y) = batch",
            "it = None",
        ],
    ),
    "as nanoGPT": (
        HEAD + """
class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
    def forward(self, x):
        return self.net(x)
    def configure_optimizers(self, lr):
        return torch.optim.SGD(self.parameters(), lr=lr)
model = GPT()
optimizer = model.configure_optimizers(0.1)
scaler = torch.amp.GradScaler("cpu", enabled=False)
iter_num = 0
local_iter_num = 0
while True:
    loss = model(torch.rand(2, 2)).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    local_iter_num += 1
    if iter_num > 4:
        break
""",
        [
            "ckpt = autockpt.attach(model=model, optimizer=optimizer, scaler=scaler)",
            "iter_num += ckpt.step_count",
            "iter_num += 1; ckpt.step()",
        ],
    ),
    "a counter around a loader": (
        HEAD + OPT + f"""
train = DataLoader(rows, batch_size=2, shuffle=True)
done = 0
while done < 5:
    for x, y in train:
        {UPDATE}
        done += 1
        if done == 5:
            break
""",
        [
            "ckpt = autockpt.attach(model=net, optimizer=opt, data=train)",
            "done += ckpt.step_count",
            "for _, (x, y) in ckpt.batches(5):",
            "done += 1; ckpt.step()",
        ],
    ),
    "a list within epochs": (
        HEAD + OPT + f"""
batches = [(torch.rand(2, 2), torch.ones(2, 1)) for _ in range(3)]
for _ in range(2):
    for x, y in batches:
        {UPDATE}
""",
        [
            "ckpt = autockpt.attach(model=net, optimizer=opt)",
            "for step in ckpt.steps(2 * len(batches)):",
            "(x, y) = batches[step % len(batches)]",
        ],
    ),
    "slices of a permutation": (
        HEAD + OPT + f"""
for epoch in range(2):
    order = torch.randperm(6)
    for at in range(0, 6, 2):
        x, y = rows[order[at : at + 2]]
        {UPDATE}
""",
        [
            "ckpt = autockpt.attach(model=net, optimizer=opt)",
            "for epoch in range(ckpt.step_count // len(range(0, 6, 2)), 2):",
            "for step in ckpt.steps(2 * len(range(0, 6, 2)), "
            "until=(epoch + 1) * len(range(0, 6, 2))):",
            "at = range(0, 6, 2)[step % len(range(0, 6, 2))]",
        ],
    ),
    "a class": (
        HEAD + """
class Trainer:
    def __init__(self):
        self.model = net
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = DataLoader(rows, batch_size=2, shuffle=True)
    def fit(self, epochs):
        for epoch in range(epochs):
            for x, y in self.loader:
                self.opt.zero_grad()
                self.model(x).sum().backward()
                self.opt.step()
Trainer().fit(2)
""",
        [
            "ckpt = autockpt.attach(model=self.model, optimizer=self.opt, data=self.loader)",
            "for step, (x, y) in ckpt.batches(epochs * len(self.loader)):",
        ],
    ),
    "two optimizers": (
        HEAD + """
other = torch.nn.Linear(1, 1)
opt_g = torch.optim.Adam(net.parameters())
params = [{"params": other.parameters()}]
opt_d = torch.optim.AdamW(params)
for step in range(3):
    loss = other(net(torch.rand(2, 2))).sum()
    loss.backward()
    opt_d.step()
    opt_g.step()
    opt_d.zero_grad(); opt_g.zero_grad()
""",
        [
            'ckpt = autockpt.attach(model={"other": other, "net": net}, '
            'optimizer={"opt_d": opt_d, "opt_g": opt_g})',
            "for step in ckpt.steps(3):",
        ],
    ),
    "something that is iterated over": (
        HEAD + """
def stream():
    for _ in range(4):
        yield torch.rand(2, 2), torch.ones(2, 1)
def build(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
opt = build(net)
for x, y in stream():
    opt.zero_grad()
    torch.nn.functional.mse_loss(net(x), y).backward()
    opt.step()
""",
        [
            "ckpt = autockpt.attach(model=net, optimizer=opt)",
            "ckpt.step()",
        ],
    ),
}  # fmt: skip


def edited(source: str, found: Advice) -> str:
    """The script with the lines where they are said to go, and `import autockpt` at its top."""
    lines = source.splitlines()
    for line in sorted(found.lines, key=lambda line: line.number, reverse=True):
        about = lines[line.number - 1]
        indent = about[: len(about) - len(about.lstrip())]
        if line.inside:
            lines.insert(line.number, f"{indent}    {line.text}")
        elif line.replaces:
            assert about.strip() == line.replaces
            lines[line.number - 1] = indent + line.text
        elif line.place == "behind":
            lines.insert(line.number, indent + line.text)
    for line in found.lines:
        if line.place == "before":
            about = source.splitlines()[line.number - 1]
            at = next(n for n, text in enumerate(lines) if _is_at(text, found, line.number, about))
            lines.insert(at, about[: len(about) - len(about.lstrip())] + line.text)
    return "\n".join(["import autockpt", *lines])


def _is_at(text: str, found: Advice, number: int, about: str) -> bool:
    """Whether a line is that of a number, or what stands instead of it."""
    instead = [line.text for line in found.lines if line.number == number and line.replaces]
    return text.strip() == (instead[0] if instead else about.strip())


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[PassThroughSession]:
    """What attach gave to a script: it checks its arguments, and saves nothing."""
    made: list[PassThroughSession] = []

    def attach(*, model: Any, optimizer: Any, data: Any = None, **others: Any) -> Any:
        LiveState.of(model=model, optimizer=optimizer, **others).dry_encode()
        made.append(PassThroughSession(data, None))
        return made[-1]

    monkeypatch.setattr(autockpt, "attach", attach, raising=False)
    return made


def weights(source: str) -> list[torch.Tensor]:
    """Of the net of a script that has run."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "script", "exec"), names)
    return [tensor.clone() for tensor in names["net"].state_dict().values()]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_lines_run_in_their_script(shape: str, sessions: list[PassThroughSession]) -> None:
    """As printed, and the script trains what it trained without them."""
    source, expected = SHAPES[shape]
    found = lines_to_add(source)
    assert [line.text for line in found.lines][: len(expected)] == expected
    plain = weights(source)
    protected = weights(edited(source, found))
    assert all(map(torch.equal, plain, protected))
    assert len(sessions) == 1
    assert sessions[0].step_count > 2


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("while True:\n    pass\n", id="nothing known"),
        pytest.param("x = (", id="not Python"),
        pytest.param(
            HEAD + OPT + """
def train(net, loader, opt):
    for x, y in loader:
        opt.step()
for epoch in range(3):
    train(net, DataLoader(rows), opt)
""",
            id="an epoch in a function",
        ),
    ],
)  # fmt: skip
def test_a_script_that_is_not_understood_gets_an_example(source: str, tmp_path: Path) -> None:
    """It is called one: nothing is said to run that may not."""
    (tmp_path / "s.py").write_text(source)
    assert not lines_to_add(source).lines
    text = advice(str(tmp_path / "s.py"))
    assert "was not recognised" in text
    assert all(line in text for line in EXAMPLE)
    assert "without a DataLoader: for step in ckpt.steps(total_steps):" in text


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "from transformers import Trainer\nt = Trainer(model=m)\nt.train()",
            ("Hugging Face Trainer", "autockpt.integrations.huggingface.protect(t)", "t.train()"),
        ),
        (
            "import trl\ntrainer = trl.SFTTrainer(model=m)\ntrainer.train()",
            ("Hugging Face Trainer", "autockpt.integrations.huggingface.protect(trainer)"),
        ),
        (
            "import lightning as L, transformers\nt = L.Trainer(max_epochs=3)",
            ("Lightning Trainer", "t = Trainer(..., callbacks=[autockpt.integrations.lightning"),
        ),
        (
            "from accelerate import Accelerator\nacc = Accelerator()\n" + HEAD + OPT,
            ("Accelerate", "ckpt = autockpt.integrations.accelerate.attach(acc)"),
        ),
        (
            "from lightning.fabric import Fabric\nfabric = Fabric()\n" + HEAD + OPT,
            ("Lightning Fabric", "autockpt.integrations.lightning.attach(fabric, {"),
        ),
        (
            "from ignite.engine import Engine\ntrainer = Engine(train)\n" + HEAD + OPT,
            ("Ignite", "autockpt.integrations.ignite.attach(trainer, model=model"),
        ),
        (
            "import ray, transformers\nfrom ray.train.torch import TorchTrainer\n"
            "TorchTrainer(loop).fit()",
            ("Ray Train", "in the train loop", "ckpt = autockpt.integrations.ray.attach("),
        ),
    ],
)
def test_a_framework_is_named_with_its_line(
    source: str, said: tuple[str, ...], tmp_path: Path
) -> None:
    """A script without a loop of its own gets no loop to paste."""
    (tmp_path / "s.py").write_text(source)
    text = advice(str(tmp_path / "s.py"))
    assert all(part in text for part in said)
    assert "for step, batch in ckpt.batches(total_steps)" not in text


def test_a_trainer_of_ones_own_is_no_framework(tmp_path: Path) -> None:
    """The name alone says nothing: the package is imported, or it is not."""
    (tmp_path / "s.py").write_text("class Trainer: ...\nTrainer().train()\n")
    assert "Hugging Face" not in advice(str(tmp_path / "s.py"))


def test_what_a_restart_would_do_otherwise_is_said() -> None:
    """Orders drawn for an epoch, and loaders that nobody counts."""
    assert "is drawn anew" in lines_to_add(SHAPES["slices of a permutation"][0]).notes[0]
    source = SHAPES["as nanoGPT"][0].replace("iter_num = 0", "d = DataLoader(rows)\niter_num = 0")
    assert "position in d is not kept" in lines_to_add(source).notes[0]


def test_the_example_gets_its_own_lines() -> None:
    """The untouched example, as `autockpt run` would print it."""
    text = advice(str(ROOT / "examples" / "untouched" / "train.py"))
    assert "UNPROTECTED: train.py" in text
    assert "`import autockpt` at the top" in text
    assert "for _, (images, labels) in ckpt.batches(args.steps):" in text
    assert "instead of: for images, labels in loader:" in text
    assert "before the loop in line" in text


def test_a_file_that_is_gone_still_gets_advice() -> None:
    """An example."""
    assert EXAMPLE[0] in advice("nowhere.py")
