"""`make bench-redundancy`: what it costs to keep a checkpoint in the memory of other nodes.

Transfer: an image of one rank comes from the slot of one process into that of another, by
`TransferPool.fetch` in 1, 2 and 4 streams (digests verified, acknowledged), and by a plain
`os.sendfile` into `recv_into` of the same bytes; in turn, ratios within a round.  Over loopback,
and as root between two network namespaces whose link tc holds to a rate.

Product: the example job on four nodes, with copies, with parity and with storage; three of its
nodes killed, one after the other (`redundancy_job`).

Parity: the rate at which a holder takes the chunks of the other members of its set into its parity,
against a plain copy of the same bytes, for one loss and for two, and beside them pyeclib where it
is installed.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import Row, parse, publish, row
from benchmarks.namespaces import Node, network
from benchmarks.redundancy_job import product
from benchmarks.redundancy_parity import parity_rows

UNSHAPED_TARGET, SHAPED_TARGET = 0.70, 0.85
LOCAL = Node(host="127.0.0.1", prefix=())
TIMEOUT_S = 600.0
ROOT = Path(__file__).parent.parent

Samples = list[dict[str, float]]
"""Seconds by contestant ("plain", or a number of streams), one dictionary a round."""


def main() -> None:
    """Measures and publishes."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--mib", type=int, default=512, help="size of the image")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--size", default="1m", help="of the example job")
    parser.add_argument(
        "--steps", type=int, default=80, help="iterations of the example job, by parts twice"
    )
    parser.add_argument("--only", choices=["transfer", "job"], help="one part, for a quick look")
    parser.add_argument("--mbit", type=int, default=2000, help="rate of the shaped link")
    args = parse(parser, mib=16, rounds=1, streams=1, size="tiny", steps=20)
    nbytes = args.mib * 2**20
    rows: list[Row] = []
    if args.only != "job":
        rows += unshaped(transfers(LOCAL, LOCAL, nbytes, args.streams, args.rounds), nbytes)
        rows += shaped(nbytes, args.streams, max(3, args.rounds // 3), args.mbit * 10**6)
        rows += parity_rows(args.mib, args.rounds)
    if args.only != "transfer":
        rows += product(args.size, args.steps, smoke=args.smoke)
    variant = f"_{args.only}" if args.only else ""
    publish("redundancy", rows, settings=vars(args), variant=variant, smoke=args.smoke)


def transfers(lender: Node, lost: Node, nbytes: int, streams: int, rounds: int) -> Samples:
    """Runs both ends and collects what the one that fetches saw."""
    ends = (sys.executable, "-m", "benchmarks.redundancy_ends")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    lending = subprocess.Popen(
        [*lender.prefix, *ends, "lend", lender.host, str(nbytes)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert lending.stdin is not None
    assert lending.stdout is not None
    try:
        ports = json.loads(lending.stdout.readline())
        words = [lost.host, lender.host, ports["pool"], ports["plain"], nbytes, streams, rounds]
        fetching = subprocess.run(
            [*lost.prefix, *ends, "fetch", *map(str, words)],
            stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment, check=True,
            timeout=TIMEOUT_S,
        )  # fmt: skip
        return [json.loads(line) for line in fetching.stdout.splitlines()]
    finally:
        lending.stdin.close()
        lending.wait(timeout=30)
        lending.stdout.close()


def unshaped(samples: Samples, nbytes: int) -> list[Row]:
    """Rates over loopback, and what is left of the plain rate."""
    rows = [_rates("loopback", name, samples, nbytes) for name in samples[0]]
    for name in samples[0]:
        if name != "plain":
            ratios = [one["plain"] / one[name] for one in samples]
            rows.append(_row("loopback", name, "of a plain copy", ratios, UNSHAPED_TARGET))
    return rows


def shaped(nbytes: int, streams: int, rounds: int, bits_per_s: int) -> list[Row]:
    """The share of a link that tc holds to a rate; no rows where that cannot be had."""
    link = f"link of {bits_per_s / 1e6:g} Mbit/s"
    try:
        with network(2, bits_per_s) as two:
            lender, lost = two.nodes
            samples = transfers(lender, lost, nbytes, streams, rounds)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{link}: not measured, needs root, ip and tc: {error}")
        return []
    return [
        _row(link, name, "of the link", [8 * nbytes / one[name] / bits_per_s for one in samples],
             None if name == "plain" else SHAPED_TARGET)
        for name in samples[0]
    ]  # fmt: skip


def _rates(link: str, name: str, samples: Samples, nbytes: int) -> Row:
    return row(_named(link, name), "rate", [nbytes / one[name] / 1e9 for one in samples], "GB/s")


def _row(link: str, name: str, figure: str, samples: list[float], at_least: float | None) -> Row:
    return row(_named(link, name), figure, samples, "x", at_least=at_least)


def _named(link: str, name: str) -> str:
    return f"{link}, {'plain sendfile' if name == 'plain' else f'fetch, streams {name}'}"


if __name__ == "__main__":
    main()
