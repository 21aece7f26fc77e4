"""From measured times to forecasts: a link's latency and bandwidth, and how long an exchange of gradients takes on it.

A message of S bytes takes alpha + beta * S (Hockney, Parallel Computing 20, 1994), and an all-reduce over n ranks

    ring  2 (n-1) alpha + 2 (n-1)/n beta S   (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009)
    tree  2 ceil(log2 n) alpha + 2 beta S    (Sanders, Speck and Traff, Parallel Computing 35, 2009: two trees)

All times are in seconds and all sizes in bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # DDP exchanges gradients in buckets: the first one is smaller than the rest
BACKWARD = 2 / 3  # the backward pass's share of a step, during which DDP exchanges the buckets that are complete


@dataclass(frozen=True, slots=True)
class CostModel:
    """A link. `alpha_s`: seconds for each message. `beta_s`: seconds for each byte. `error`: the median relative error
    over the points that it was fitted to."""

    alpha_s: float
    beta_s: float
    error: float = 0.0


def bus_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth divided by algorithm bandwidth, as in nccl-tests (doc/PERFORMANCE.md there).

    The bus bandwidth is what each link carries, and does not depend on the number of ranks.
    """
    return {"all-reduce": 2 * (ranks - 1) / ranks, "all-gather": (ranks - 1) / ranks}.get(operation, 1.0)


def fit_all_reduce(points: Sequence[tuple[float, float]], ranks: int) -> CostModel:
    """The link on which an all-reduce along a ring of `ranks` takes these (bytes, seconds), of two sizes at least.

    The straight line with the least relative error, so that small messages count as much as large ones. Neither latency
    nor time per byte can be below 0.
    """
    sizes, times = np.array(points, dtype=float).T
    beta_s, alpha_s = np.polyfit(sizes, times, 1, w=1 / times)
    if beta_s < 0:  # noise: larger messages seem faster
        beta_s, alpha_s = 0.0, np.average(times, weights=times**-2)
    alpha_s = max(0.0, alpha_s)
    error = np.median(np.abs(alpha_s + beta_s * sizes - times) / times)
    hops = 2 * (ranks - 1)
    return CostModel(float(alpha_s / hops), float(beta_s * ranks / hops), float(error))


def ring_s(link: CostModel, ranks: int, size: float) -> float:
    """Seconds of an all-reduce of `size` bytes along a ring."""
    return 0.0 if ranks == 1 else 2 * (ranks - 1) * (link.alpha_s + link.beta_s * size / ranks)


def tree_s(link: CostModel, ranks: int, size: float) -> float:
    """Seconds of an all-reduce of `size` bytes along two trees."""
    return 0.0 if ranks == 1 else 2 * math.ceil(math.log2(ranks)) * link.alpha_s + 2 * link.beta_s * size


def buckets(size: float) -> list[float]:
    """The sizes of the messages in which DDP exchanges `size` bytes of gradients."""
    first = min(size, FIRST_BUCKET)
    rest = size - first
    return [first, *[BUCKET] * int(rest // BUCKET), *([rest % BUCKET] if rest % BUCKET else [])]


def expected(link: CostModel, size: float, step_s: float, counts: Sequence[int]) -> list[dict[str, float]]:
    """For each number of ranks: the exchange's seconds by ring and by tree, and the efficiency with the faster one.

    Efficiency is the work of n ranks divided by n times the work of one rank alone. "efficiency": nothing of the
    exchange is hidden behind the backward pass. "efficiency_hidden": all buckets but the last are hidden as far as the
    backward pass has time for them; the last one can't be, because no gradient is computed after it.
    """
    rows = []
    for ranks in counts:
        ring = [ring_s(link, ranks, part) for part in buckets(size)]
        tree = [tree_s(link, ranks, part) for part in buckets(size)]
        times = min(ring, tree, key=sum)
        exposed_s = times[-1] if len(times) == 1 else max(times[-1], sum(times) - BACKWARD * step_s)
        rows.append({
            "ranks": ranks, "ring_s": sum(ring), "tree_s": sum(tree),
            "efficiency": step_s / (step_s + sum(times)), "efficiency_hidden": step_s / (step_s + exposed_s),
        })
    return rows
