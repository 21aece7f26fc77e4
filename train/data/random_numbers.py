"""Seeds and random numbers that depend on what they are for, not on what was drawn before them.

So neither the world size, nor a restart, nor the number of workers changes an order or a pixel.
"""

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# The constants of splitmix64 as signed 64-bit integers: torch cannot multiply uint64, and int64 wraps in the same way.
GOLDEN_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15
MIX = ((30, -4658895280553007687), (27, -7723592293110705685))  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def derive_seed(*numbers: int) -> int:
    """A seed of 63 bits from several integers.

    Sums and products of seeds collide: seed 1 in epoch 2 would get the order of seed 2 in epoch 1.
    """
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


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


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed Python, torch and, where it is loaded already, numpy, in this process; torch on all GPUs too where `device`
    is one of them.

    For the CPU that is left out: each step seeds anew, and to ask after GPUs takes 70 µs there, ten times the rest.
    """
    if device.type != "cpu":
        torch.manual_seed(seed)
    seed_host(seed)


def seed_host(seed: int) -> None:
    """The same without accelerators, as it is done for each sample."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Whatever draws random numbers in the block, Python, torch and numpy draw afterwards as if nothing had."""
    state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    devices = [] if device.type == "cpu" else [device.index or 0]
    try:
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            yield
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(numpy_state)
