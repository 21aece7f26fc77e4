"""From measured times to expected ones: latency and bandwidth of a link, and what an exchange of gradients costs on it.

A message of S bytes takes alpha + beta * S (Hockney, Parallel Computing 20, 1994). An all-reduce over n ranks then takes

    ring  2 (n-1) alpha + 2 (n-1)/n beta S      (Patarasu and Yuan, J. Parallel Distrib. Comput. 69, 2009)
    tree  2 ceil(log2 n) alpha + 2 beta S       (two trees, pipelined: Sanders, Speck and Traff, Parallel Computing 35, 2009)

Times in seconds, sizes in bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # ddp exchanges gradients in buckets: one small, then of this size
BACKWARD = 2 / 3  # of a step's time, during which ddp can exchange what is done already


@dataclass(frozen=True, slots=True)
class Link:
    """`alpha_s` seconds a message, `beta_s` seconds a byte. `error`: how far off it is, the median over what it was fitted to."""

    alpha_s: float
    beta_s: float
    error: float = 0.0

    def message_s(self, size: float) -> float:
        return self.alpha_s + self.beta_s * size


def bus_factor(operation: str, ranks: int) -> float:
    """Bus over algorithm bandwidth, as nccl-tests has it (doc/PERFORMANCE.md there): what each link carries, whatever n."""
    return {"all-reduce": 2 * (ranks - 1) / ranks, "all-gather": (ranks - 1) / ranks}.get(operation, 1.0)


def fit(points: Sequence[tuple[float, float]]) -> Link:
    """The straight line through (bytes, seconds) with the least relative error: small messages count as much as large ones."""
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    above = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    below = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    beta_s = max(0.0, above / below) if below else 0.0
    alpha_s = max(0.0, mean_y - beta_s * mean_x)
    errors = sorted(abs(alpha_s + beta_s * x - y) / y for x, y in points)
    return Link(alpha_s, beta_s, errors[len(errors) // 2])


def fit_all_reduce(points: Sequence[tuple[float, float]], ranks: int) -> Link:
    """The link on which a ring of `ranks` would take these (bytes, seconds)."""
    line = fit(points)
    hops = 2 * (ranks - 1)
    return Link(line.alpha_s / hops, line.beta_s * ranks / hops, line.error)


def ring_s(link: Link, ranks: int, size: float) -> float:
    """An all-reduce of `size` bytes along a ring."""
    return 0.0 if ranks == 1 else 2 * (ranks - 1) * (link.alpha_s + link.beta_s * size / ranks)


def tree_s(link: Link, ranks: int, size: float) -> float:
    """The same along two trees."""
    return 0.0 if ranks == 1 else 2 * math.ceil(math.log2(ranks)) * link.alpha_s + 2 * link.beta_s * size


def buckets(size: float) -> list[float]:
    """The sizes in which ddp exchanges so many bytes of gradients."""
    first = min(size, FIRST_BUCKET)
    rest = size - first
    return [first, *[BUCKET] * int(rest // BUCKET), *([rest % BUCKET] if rest % BUCKET else [])]


def expected(link: Link, size: float, step_s: float, counts: Sequence[int]) -> list[dict[str, float]]:
    """For each number of ranks: the exchange's time by ring and tree, and with the quicker of them the efficiency, of n times
    the work of one rank: if nothing is hidden behind the backward pass, and if all buckets but the last, which no gradient
    follows, are hidden as far as they fit.
    """
    rows = []
    for ranks in counts:
        ways = [[of(link, ranks, part) for part in buckets(size)] for of in (ring_s, tree_s)]
        times = min(ways, key=sum)
        late_s = times[-1] if len(times) == 1 else max(times[-1], sum(times) - BACKWARD * step_s)
        rows.append({
            "ranks": ranks, "ring_s": sum(ways[0]), "tree_s": sum(ways[1]),
            "efficiency": step_s / (step_s + sum(times)), "efficiency_hidden": step_s / (step_s + late_s),
        })
    return rows
