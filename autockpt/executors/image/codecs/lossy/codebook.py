"""Non-uniform quantisation: k-means on a line, from quantiles, on a sample; the same every time."""

import torch

SAMPLE = 2**18
"""Values that the centres are found from; beyond that they move by less than they differ."""
ROUNDS = 40


def centres_of(values: torch.Tensor, count: int) -> torch.Tensor:
    """At most `count` ascending centres [count] float32 of finite float32 values [n].

    None for no values; a value that there are only few of is a centre itself.
    """
    sample, _ = _sample(values).sort()
    distinct: torch.Tensor = sample.unique_consecutive()
    if len(distinct) <= count:
        return distinct
    places = torch.linspace(
        0, len(sample) - 1, 2 * count + 1, dtype=torch.float32, device=values.device
    )[1::2]
    centres = sample[places.long()]
    ends = sample.double().cumsum(0)
    for _ in range(ROUNDS):
        centres = _moved(centres, sample, ends)
    made: torch.Tensor = centres.unique_consecutive()
    return made


def _sample(values: torch.Tensor) -> torch.Tensor:
    """Every k-th: no random numbers, so a frame is the same every time."""
    return values[:: max(1, -(-len(values) // SAMPLE))]


def _moved(centres: torch.Tensor, ordered: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Each centre to the mean of the values nearest to it; one without values stays."""
    stops = torch.searchsorted(ordered, borders(centres)).tolist()
    edges = torch.tensor([0, *stops, len(ordered)], dtype=torch.int64, device=ordered.device)
    until = torch.cat([sums.new_zeros(1), sums])[edges]
    counts = edges.diff()
    means = (until.diff() / counts.clamp(min=1)).float()
    return torch.where(counts > 0, means, centres).sort().values


def borders(centres: torch.Tensor) -> torch.Tensor:
    """Half-way between neighbours, [len - 1]."""
    return centres[:-1] / 2 + centres[1:] / 2


def nearest(values: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    """Number of the nearest centre of each value, uint8."""
    return torch.bucketize(values, borders(centres), out_int32=True).to(torch.uint8)
