"""What this very training would gain here from other settings, measured before its first step: settings that change
numbers (bf16, more threads) or take more of the machine (workers), so that they are for the user to choose."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from rankup import Group
from rankup.seeds import state_kept

from ..config import Config
from ..parallel.methods import Method
from ..parallel.model import autocast
from ..workloads import Workload

LEAST_STEPS = 40  # a shorter training has nothing to gain
ROUNDS = 3  # the variants take turns: a machine that is busy for a moment slows all of them
LONGEST_S = 1.0  # of a pass: slower ones are not measured
MOST_THREADS = 16  # of a process: few models gain from more
LEAST_GAIN = 1.1


def advise(
    config: Config, group: Group, method: Method, workload: Workload, plain: nn.Module, make_batch: Callable[[], Any]
) -> None:
    """On rank 0. `plain`: the user's module; its weights, buffers and gradients stay as they are. `make_batch` prepares
    a micro-batch, on the device."""
    # Where forward waits for other ranks, or may do so in code that is not ours, rank 0 can't run it alone. With dp one
    # pass takes several GPUs. A compiled model would be compiled once more
    alone = method.replicates_state and config.parallel != "dp" and not config.sync_bn and not config.compile
    if not alone or (group.world_size > 1 and ":" in config.workload):
        return
    try:
        for line in lines(config, group, workload, plain, make_batch):
            group.log.info(f"advice: {line}")
    except Exception as error:  # an operation without bf16, too little memory: no reason to end a training
        group.log.debug(f"no advice: {type(error).__name__}: {error}")


def lines(
    config: Config, group: Group, workload: Workload, plain: nn.Module, make_batch: Callable[[], Any]
) -> Iterator[str]:
    began_s = time.perf_counter()
    batch = make_batch()
    load_s = time.perf_counter() - began_s
    threads = min(group.cpus, MOST_THREADS)
    variants = {"own": config}
    if config.precision == "fp32" and has_bf16(group.device):
        variants["bf16"] = config.model_copy(update={"precision": "bf16"})
    if group.device.type == "cpu" and threads > config.num_threads:
        variants["threads"] = config.model_copy(update={"num_threads": threads})
    times: dict[str, list[float]] = {name: [] for name in variants}
    try:
        for _ in range(ROUNDS + 1):  # the first of each chooses kernels and starts threads
            for name, variant in variants.items():
                torch.set_num_threads(variant.num_threads)
                times[name].append(_seconds_of_a_pass(variant, group.device, workload, plain, batch))
                if group.stop.requested or times[name][-1] > LONGEST_S:
                    return
    finally:
        torch.set_num_threads(config.num_threads)
    seconds = {name: statistics.median(each[1:]) for name, each in times.items()}
    if not getattr(workload.train, "in_memory", False) and not config.num_workers:
        # A GPU's rank computes elsewhere, so its workers may have all CPUs
        free = group.cpus - (config.num_threads if group.device.type == "cpu" else 0)
        yield from on_workers(load_s=load_s, pass_s=seconds["own"], free=free)
    yield from on_setting("--precision bf16", "It rounds more: compare the losses.", seconds, "bf16")
    yield from on_setting(f"--num-threads {threads}", "The last bits of the weights change.", seconds, "threads")


def has_bf16(device: torch.device) -> bool:
    """Whether the device computes in bf16 itself. Others emulate it, which is slower than fp32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return False


def _seconds_of_a_pass(
    config: Config, device: torch.device, workload: Workload, plain: nn.Module, batch: Any
) -> float:
    """Forward and backward of a micro-batch with these settings."""
    parameters = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    with state_kept(device, [plain]):
        _wait_for(device)
        began_s = time.perf_counter()
        with autocast(config, device):
            loss = workload.loss(plain, batch)
        # Not backward(): what exchanges gradients would hear of it
        torch.autograd.grad(loss, parameters, allow_unused=True)
        _wait_for(device)
        return time.perf_counter() - began_s


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def on_setting(setting: str, price: str, seconds: dict[str, float], name: str) -> Iterator[str]:
    """Advice for a setting with which forward and backward take `seconds[name]` in place of `seconds["own"]`."""
    if name in seconds and (gain := seconds["own"] / seconds[name]) >= LEAST_GAIN:
        yield (
            f"{setting} would make forward and backward {gain:.1f} times as fast here (measured: "
            f"{1000 * seconds[name]:.1f} ms in place of {1000 * seconds['own']:.1f} ms). {price}"
        )


def on_workers(*, load_s: float, pass_s: float, free: int) -> Iterator[str]:
    """Advice where the training prepares each batch itself, in `load_s` seconds. `free`: idle CPUs."""
    wanted = min(free, math.ceil(load_s / max(pass_s, 1e-6)))
    if wanted >= 1 and (gain := (load_s + pass_s) / max(pass_s, load_s / wanted)) >= LEAST_GAIN:
        yield (
            f"--num-workers {wanted} may gain up to {gain:.1f}x here (measured: preparing a batch takes "
            f"{1000 * load_s:.1f} ms, forward and backward {1000 * pass_s:.1f} ms), and CPUs are idle."
        )
