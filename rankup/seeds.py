"""Random numbers that depend only on their purpose (seed, step, rank), not on what was drawn before."""

import hashlib
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

CPU = torch.device("cpu")


def derive_seed(*numbers: int) -> int:
    """Hash several integers into one seed of 63 bits.

    Sums and products of seeds would collide: seed 1 in epoch 2 would get the order of seed 2 in epoch 1.
    """
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed Python, torch and, if it has been imported, numpy in this process. If `device` is a GPU, seed torch on all
    GPUs too.

    On a CPU the function does not look for GPUs: every step seeds, and looking takes 70 µs, ten times the rest.
    """
    if device != CPU:  # faster than `device.type`, which makes a string each time
        torch.manual_seed(seed)
    seed_host(seed)


def seed_host(seed: int) -> None:
    """Seed Python, torch on the CPU and, if it has been imported, numpy. This runs for each sample."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


def host_state() -> tuple[Any, ...]:
    """Return the random state of Python, torch on the CPU and, if it has been imported, numpy."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), torch.get_rng_state(), numpy.random.get_state() if numpy else None


def set_host_state(state: tuple[Any, ...]) -> None:
    """Restore what `host_state` returned."""
    random.setstate(state[0])
    torch.set_rng_state(state[1])
    if state[2] is not None:
        sys.modules["numpy"].random.set_state(state[2])


@contextmanager
def host_state_kept() -> Iterator[None]:
    """Restore the host's random state after the block."""
    state = host_state()
    try:
        yield
    finally:
        set_host_state(state)


@contextmanager
def state_kept(device: torch.device, modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Restore all random states and the buffers of `modules` after the block: a forward pass in it leaves no trace."""
    buffers = [(module, {name: each.detach().clone() for name, each in module.named_buffers()}) for module in modules]
    devices = [] if device.type == "cpu" else [device.index or 0]
    try:
        with host_state_kept(), torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            yield
    finally:
        with torch.no_grad():
            for module, before in buffers:
                for name, buffer in module.named_buffers():  # looked up again: forward may have replaced buffers
                    buffer.copy_(before[name])
