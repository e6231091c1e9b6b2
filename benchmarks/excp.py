"""`make bench-excp`: what the lossy archive codecs save, what they cost, and what training loses.

The example's GPT is trained from scratch on the CPU, past warm-up and most of its decay.  The last
checkpoints form a chain: one lossless, then lossy ones against what the former restores.  The last
pair gives ratio and time; then the job is resumed for 200 steps from the true state with several
data orders, and from each lossy one.  `--size` says how large: the default is what a laptop trains
in about a quarter of an hour, and no statement on models of another size.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autockpt.executors.image.codecs.lossy import coding, frame, pruned
from autockpt.executors.image.codecs.lossy.coding import Method
from autockpt.executors.image.codecs.lossy.frame import Form
from autockpt.executors.image.codecs.lossy.thresholds import BALANCED, PUBLISHED, Thresholds
from benchmarks.harness import Row, parse, publish, row
from benchmarks.job import load_example

Moments = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
State = dict[str, Moments]
"""(weight, first moment, second moment) by parameter name."""
BYTES_PER_PARAMETER = 12
EVALUATED = 32
"""Batches of text that no resume trains on."""


def main() -> None:
    """Trains, encodes, resumes, publishes."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--size", default="1m")
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--gap", type=int, default=100, help="Steps between checkpoints.")
    parser.add_argument("--members", type=int, default=5, help="Of the chain, the full one too.")
    parser.add_argument("--resumed", type=int, default=200, help="Steps after the resume.")
    parser.add_argument(
        "--lossless-runs", type=int, default=5, help="Lossless resumes to compare with."
    )
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    args = parse(
        parser, size="tiny", steps=12, gap=4, members=2, resumed=4, orders=2, batch=1,
    )  # fmt: skip
    torch.set_num_threads(args.threads)
    job = Training(args.size, args.steps + args.resumed, args.batch)
    chain = list(job.checkpoints(args.steps, args.gap, args.members))
    published = PUBLISHED.for_parameters(job.parameters)
    ways: dict[str, Way] = {
        "excp": Way("excp", BALANCED.for_parameters(job.parameters)),
        "excp-published": Way("excp", published),
        "excp-published, alpha as it is": Way("excp", PUBLISHED),
        "quantised": Way("quantised", PUBLISHED),
    }
    rows: list[Row] = []
    states: dict[str, State] = {}
    for name, way in ways.items():
        coded = encode_chain(chain, way)
        states[name] = coded.state
        rows += size_rows(name, coded, chain[-1])
    states["excp-published, v pruned to 0"] = without_fill(states["excp-published"])
    rows += quality_rows(job, chain[-1], states, args.resumed, args.orders)
    publish("excp", rows, settings=vars(args) | {"parameters": job.parameters},
            smoke=args.smoke)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """A codec with its thresholds."""

    method: Method
    thresholds: Thresholds


@dataclass(slots=True)
class Encoded:
    """The last pair of a chain."""

    state: State
    """What a restore gets."""
    bytes: int = 0
    streams: dict[str, int] = field(default_factory=dict)
    entropy_bits: float = 0.0
    """Of the symbols of weights and moments, order 0."""
    encode_s: float = 0.0
    decode_s: float = 0.0


class Training:
    """The example's model, AdamW and schedule, over a fixed text; goes on from any state."""

    def __init__(self, size: str, horizon: int, batch: int) -> None:
        self._example = load_example()
        torch.manual_seed(0)
        self.model = self._example.GPT(size, 128, 0.0)
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0},
        ]  # fmt: skip
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
        self._horizon, self._batch = horizon, batch
        text = self._example.standard_library_text(10**7)
        windows = text.unfold(0, 129, 128)
        kept_out = EVALUATED * batch
        self._held, self._windows = windows[-kept_out:], windows[:-kept_out]
        self.parameters = sum(p.numel() for p in self.model.parameters())

    def checkpoints(self, steps: int, gap: int, members: int) -> Iterator[State]:
        """Trains, and yields the state at the last `members` multiples of `gap` before the end."""
        wanted = {steps - gap * back for back in range(members)}
        began = time.perf_counter()
        for step, loss in enumerate(self.train(0, steps, order=0), start=1):
            if step % 100 == 0:
                print(f"step {step}: {loss:.3f}, {time.perf_counter() - began:.0f} s", flush=True)
            if step in wanted:
                yield self.state()
        self.at = steps

    def train(self, first: int, steps: int, *, order: int) -> Iterator[float]:
        """Losses of `steps` steps over windows in this order."""
        generator = torch.Generator().manual_seed(1000 * order + first)
        places = torch.randint(0, len(self._windows), (steps, self._batch), generator=generator)
        for number in range(steps):
            factor = self._example.learning_rate_factor(first + number, self._horizon)
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-3 * factor
            batch = self._windows[places[number]].long()
            loss = self.model(batch[:, :-1], batch[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield loss.item()

    def state(self) -> State:
        """A copy."""
        named = self.model.named_parameters()
        return {name: self._moments(parameter) for name, parameter in named}

    def _moments(self, parameter: Any) -> Moments:
        own = self.optimizer.state[parameter]
        first, second = own["exp_avg"].clone(), own["exp_avg_sq"].clone()
        return parameter.detach().clone(), first, second

    def take(self, state: State) -> None:
        """Puts a state in the place of the live one; the step counters stay."""
        for name, parameter in self.model.named_parameters():
            own = self.optimizer.state[parameter]
            for live, saved in zip(
                (parameter.data, own["exp_avg"], own["exp_avg_sq"]), state[name], strict=True
            ):
                live.copy_(saved)
            own["step"].fill_(self.at)

    @torch.no_grad()
    def held_out(self) -> float:
        """Mean loss on text that nothing was trained on."""
        losses = [
            self.model(batch[:, :-1], batch[:, 1:]).item()
            for batch in self._held.long().split(self._batch)
        ]
        return statistics.fmean(losses)


def encode_chain(chain: list[State], way: Way) -> Encoded:
    """Every member against what the former one restores; figures of the last."""
    base, done = chain[0], Encoded(state={})
    for member in chain[1:]:
        done = Encoded(state={})
        for name, (weight, first, second) in member.items():
            began = time.perf_counter()
            coded = coding.encode_group(
                weight, first, second, base[name][0], way.method, way.thresholds
            )
            done.encode_s += time.perf_counter() - began
            _count(done, coded.frames, coding.form_of(weight))
            began = time.perf_counter()
            done.state[name] = _decoded(coded.frames, member[name], base[name][0])
            done.decode_s += time.perf_counter() - began
        base = done.state
    return done


def _count(done: Encoded, frames: tuple[bytes, ...], form: Form) -> None:
    for data in frames:
        parsed = frame.parse(data)
        done.bytes += len(data)
        if parsed.kind == "pruned":
            names = ("weights", "first moments", "second moments", "centres", "fill")
            parts = dict(zip(names, map(len, parsed.streams), strict=True))
            symbols = pruned.from_streams(parsed.streams, form)
            done.entropy_bits += sum(
                map(entropy_bits, (symbols.weights, symbols.first, symbols.second))
            )
        else:
            parts = {f"tensors kept as {parsed.kind}": sum(map(len, parsed.streams))}
        parts["frames' heads"] = len(data) - sum(map(len, parsed.streams))
        for name, count in parts.items():
            done.streams[name] = done.streams.get(name, 0) + count


def entropy_bits(symbols: torch.Tensor) -> float:
    """Bits that an ideal coder needs which knows how frequent each symbol is, and nothing else."""
    counts = torch.bincount(symbols.long()).double()
    shares = counts[counts > 0] / max(1, len(symbols))
    return float(-(shares * shares.log2()).sum()) * len(symbols)


def _decoded(frames: tuple[bytes, ...], like: Moments, base: torch.Tensor) -> Moments:
    forms = [coding.form_of(tensor) for tensor in like]
    if len(frames) == 1:
        weight, first, second = coding.decode(frames[0], forms, base)
        return weight, first, second
    (weight,) = coding.decode(frames[0], forms[:1], base)
    (first,), (second,) = (
        coding.decode(data, [form], None) for data, form in zip(frames[1:], forms[1:], strict=True)
    )
    return weight, first, second


def size_rows(name: str, coded: Encoded, state: State) -> list[Row]:
    """Ratio, where the bytes go, and speed."""
    parameters = sum(weight.numel() for weight, _, _ in state.values())
    raw = BYTES_PER_PARAMETER * parameters
    target = 25.0 if name == "excp" else None
    rows = [
        row(name, "ratio to 12 bytes per parameter", [raw / coded.bytes], "x", at_least=target),
        row(name, "encode", [raw / coded.encode_s / 1e6], "MB/s"),
        row(name, "decode", [raw / coded.decode_s / 1e6], "MB/s"),
    ]
    if coded.entropy_bits:
        ideal = coded.entropy_bits / parameters
        rows.append(row(name, "bits per parameter: entropy of all symbols", [ideal], "bit"))
    for part, count in coded.streams.items():
        rows.append(row(name, f"bits per parameter: {part}", [8 * count / parameters], "bit"))
    return rows


def without_fill(lossy: State) -> State:
    """As ExCP publishes it: second moments go where first moments went, to 0."""
    zeroed = {}
    for name, (weight, first, second) in lossy.items():
        matrix = weight.ndim >= 2 and weight.numel() >= coding.SMALL
        zeroed[name] = (weight, first, torch.where(first != 0, second, 0.0) if matrix else second)
    return zeroed


def quality_rows(
    job: Training, exact: State, lossy: Mapping[str, State], steps: int, orders: int
) -> list[Row]:
    """Mean training loss after a resume, against the spread of lossless ones."""
    optimizer = copy.deepcopy(job.optimizer.state_dict())
    true = [_resumed(job, exact, steps, order=order) for order in range(1, orders + 1)]
    rows = _quality("lossless", true, None)
    # An order whose loss is in the middle: inside the spread then means closer than data orders.
    middle = 1 + sorted(range(orders), key=lambda number: true[number].mean)[orders // 2]
    for name, state in lossy.items():
        job.optimizer.load_state_dict(optimizer)
        rows += _quality(name, [_resumed(job, state, steps, order=middle)], true)
    return rows


@dataclass(frozen=True)
class Resumed:
    """One resume."""

    mean: float
    first: float
    """Of the first 20 steps."""
    after: float
    """On held-out text, at the end."""


def _resumed(job: Training, state: State, steps: int, *, order: int) -> Resumed:
    job.take(state)
    losses = list(job.train(job.at, steps, order=order))
    found = Resumed(statistics.fmean(losses), statistics.fmean(losses[:20]), job.held_out())
    print(f"resumed, order {order}: {found}", flush=True)
    return found


def _quality(name: str, found: list[Resumed], true: list[Resumed] | None) -> list[Row]:
    rows = []
    for figure, key in (
        ("mean loss of the resumed steps", "mean"),
        ("mean loss of the first 20", "first"),
        ("held-out loss at the end", "after"),
    ):
        one = row(name, figure, [getattr(resume, key) for resume in found], "nat")
        if true is not None and key == "mean":
            spread = [resume.mean for resume in true]
            inside = min(spread) <= found[0].mean <= max(spread)
            one = replace(one, target=f"{min(spread):.3f} to {max(spread):.3f}", met=inside)
        rows.append(one)
    return rows


if __name__ == "__main__":
    main()
