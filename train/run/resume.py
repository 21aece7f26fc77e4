"""Where a training starts: at a checkpoint, at given weights, or at the model as it was built."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rankup.errors import UserError
from rankup.group.group import Group, on_rank0
from rankup.state.reading import Copy
from rankup.state.run import Run
from rankup.state.shards import INDEX, Shards

from ..config import Config
from ..parallel.method import Method
from . import weights
from .fetched import fetched
from .metrics import Progress
from .training_state import TrainingState


def load_initial_weights(
    config: Config, group: Group, plain: nn.Module, run: Run, *, data_name: str
) -> Progress:
    """Load the weights to start from into `plain`, which is still whole, and return where the run stands.

    The weights of a sharded checkpoint are loaded later, when the model is split as well. Raises UserError for a
    checkpoint of other data or of another model.
    """
    earlier = run.newest
    if earlier is None:
        if config.init_from:
            # The file needs to be on rank 0's disk only
            on_rank0(group, lambda: _start_from(config, group, plain))
            plain.load_state_dict(group.broadcast_tensors(plain.state_dict()))
        return Progress()
    state = TrainingState.of(earlier.path, earlier.record)
    if state.data != data_name:
        way_out = "Set --data-dir or --bert-dir" if state.config["workload"] == "text" else "Set --data-dir"
        raise UserError(f"{earlier.path} was trained on {state.data}, got {data_name} now. {way_out}.")
    if not earlier.sharded:
        with _must_fit(earlier):
            plain.load_state_dict(earlier.tracked["model"])
    group.log.info(f"resumed from {run.origin.words}")
    for what, then, now in (
        ("world size", state.world_size, group.world_size),
        ("shares", state.config.get("shares") or "equal", config.shares or "equal"),
        ("parallel", state.config["parallel"], config.parallel),
        ("torch", state.versions["torch"], torch.__version__),
    ):
        if then != now:
            group.log.info(f"  {what} was {then}, is {now}: the run goes on, but its last bits will differ")
    return Progress(state.step, state.evaluated, state.metrics, state.line)


def _start_from(config: Config, group: Group, plain: nn.Module) -> None:
    place = config.init_from or ""
    with fetched(place, warn=group.log.warning, timeout_s=0.9 * config.setup_timeout_s) as path:
        weights.init_from(plain, path, group.log.info, place=place)


def load_training_state(
    group: Group, method: Method, plain: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler,
    earlier: Copy | None,
) -> None:
    """Load optimizer, scaler and, from shards, the weights, once the parameters are split and the optimizer knows them.

    Raises UserError for a checkpoint that does not fit the model.
    """
    if earlier is None:
        return
    with _must_fit(earlier):
        if earlier.sharded:
            tracked = _read_shards(group, earlier, method.local_state(plain, optimizer))
            method.load_local_state(plain, optimizer, tracked)
        else:
            tracked = earlier.tracked
            method.load_optimizer_state(plain, optimizer, tracked["optimizer"])
        if tracked["scaler"]:  # empty where the precision needs no scaler
            scaler.load_state_dict(tracked["scaler"])


def _read_shards(group: Group, earlier: Copy, target: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint's state, split as `target` is. Raises RuntimeError on all ranks where it does not fit one."""
    # Rank 0 chose the checkpoint under its own path; another node may have mounted the folder elsewhere
    folder = group.run_dir / "checkpoints" / earlier.path.name
    found, problem = target, ""
    try:
        with Shards(folder, earlier.files[INDEX]) as shards:
            found = shards.read_into(target)
    except Exception as error:  # the others read their part meanwhile, and wait then
        problem = str(error) or type(error).__name__
    for rank, text in enumerate(group.gather(problem)):
        if text:
            raise RuntimeError(f"rank {rank}: {text}")
    return found


@contextmanager
def _must_fit(earlier: Copy) -> Iterator[None]:
    """torch raises one of several types where names or shapes differ: make each the user's one line."""
    try:
        yield
    except UserError:  # a ValueError that says already what is wrong
        raise
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{earlier.path} does not fit this model: {reason}. Set --fresh or another --name.") from None
