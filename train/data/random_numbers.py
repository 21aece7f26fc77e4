"""Seeds and random numbers that depend on what they are for, not on what was drawn before them.

So neither the world size, nor a restart, nor the number of workers changes an order or a pixel.
"""

import torch

from rankup.loop.seeds import derive_seed

# The constants of splitmix64 as signed 64-bit integers: torch cannot multiply uint64, and int64 wraps in the same way.
GOLDEN_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15
MIX = ((30, -4658895280553007687), (27, -7723592293110705685))  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def random_numbers(seed: int, epoch: int, indices: torch.Tensor, count: int) -> torch.Tensor:
    """`count` uniform numbers in [0, 1) for each sample of `indices` (int64 [B]): float64 [B, count].

    They are splitmix64 of (seed, epoch, sample, column), https://prng.di.unimi.it/splitmix64.c: a generator per sample
    would cost more than the augmentation itself.
    """
    start = torch.tensor(derive_seed(seed, epoch), dtype=torch.int64)
    z = start + (indices[:, None] * count + torch.arange(count)[None, :] + 1) * GOLDEN_GAMMA
    for shift, factor in MIX:
        z = (z ^ _shift_right(z, shift)) * factor
    z = z ^ _shift_right(z, 31)
    # A float64 has 53 bits of mantissa: with more, a number could be rounded up to 1.
    return _shift_right(z, 11).double() / float(1 << 53)


def _shift_right(values: torch.Tensor, bits: int) -> torch.Tensor:
    # >> copies the sign bit of an int64; masking makes it the shift of a uint64.
    return (values >> bits) & ((1 << (64 - bits)) - 1)
