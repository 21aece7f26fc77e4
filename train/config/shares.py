"""How many samples of a global batch each rank gets: equal shares, or in proportion to the setting `shares`."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def weights(shares: str, world_size: int) -> list[Fraction]:
    """The numbers of the setting `shares`, one a rank; where it is empty, a 1 for each of `world_size` ranks.

    Fractions: 0.1 is exactly a tenth, so every machine divides a batch in the same way.
    """
    return [Fraction(word) for word in shares.split(",")] if shares else [Fraction(1)] * world_size


def divide(count: int, weights: Sequence[Fraction]) -> list[int]:
    """`count` in whole parts in proportion to `weights`, by the largest remainder; of equal ones, the first.

    Equal weights give parts that differ by one at most, the larger ones first. A part may be 0.
    """
    each = count / sum(weights)
    exact = [each * weight for weight in weights]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda number: parts[number] - exact[number])
    for number in by_remainder[: count - sum(parts)]:
        parts[number] += 1
    return parts
