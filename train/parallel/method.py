"""What a method of training in parallel decides. The loop calls these hooks and knows no method by name."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn

from rankup.group.group import Group
from rankup.loop.tracked import laid_out
from rankup.observe.step_clock import Link

from ..config import Config


class Method:
    """A method by which several ranks train one model. What a subclass does not override works as in one process.

    The loop calls the hooks in this order: `refuse`, `running`, `split`, `load_optimizer_state` or `load_local_state`,
    `wrap`, `after_warm_up`; then `micro_batch` and `step` in every step, and what is saved with every checkpoint.

    `plain` is always the user's module without wrappers: its names are those in a checkpoint.
    """

    # Whether each rank holds all weights and the whole optimizer state. If not, no single rank can save them or compute
    # their digest without the others.
    replicates_state: ClassVar[bool] = True
    # Whether forward itself waits for all ranks. Evaluation then gives ranks without a batch one to pass the time with.
    forward_waits_for_all: ClassVar[bool] = False
    # Whether it needs torch's process group also where there is one rank only.
    needs_process_group: ClassVar[bool] = False
    # Whether a rank trains on one device. If not, one process takes all devices of its node.
    one_device_per_rank: ClassVar[bool] = True
    # Whether the graph of a loss ends in the model's own parameters: then it shows which ones the loss does not use.
    graph_ends_in_parameters: ClassVar[bool] = True

    def __init__(self, config: Config, group: Group) -> None:
        self.config, self.group = config, group
        # What exchanges gradients beside torch, in the middle of backward: it says how long this rank waited there
        self.exchange: Link | None = None

    @property
    def every_rank_has_all(self) -> bool:
        """Whether any rank alone can save all that the next attempt needs, at any moment between two changes of the
        weights. If not, a lost rank costs the steps since the newest checkpoint."""
        return self.replicates_state

    def refuse(self) -> None:
        """Raise ConfigError for what the method can't do with these settings, this device and so many ranks, which have
        met. Settings that exclude each other anywhere are refused earlier, by `train.config`."""

    def running(self) -> AbstractContextManager[None]:
        """What has to be up for the length of the run. Raises JoinError."""
        return nullcontext()

    # Before the first step ------------------------------------------------------------------------------------

    def split(self, plain: nn.Module) -> None:
        """Split the parameters over the ranks, in place, before the optimizer is built on them, and move what this rank
        keeps to the device. Raises ConfigError.

        The model is the same on all ranks, where it was built, with a checkpoint's weights in it if they were saved
        whole.
        """

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module whose forward and backward train with the other ranks. Raises ConfigError.

        `model` may be compiled already. Ranks may still differ here; where state is replicated they are compared next.
        """
        return model

    def after_warm_up(self, plain: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer to step with, once the warm-up's passes are over."""
        return optimizer

    # Each step ------------------------------------------------------------------------------------------------

    def micro_batch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch. Gradients are exchanged in the step's `last` one only:
        before, they add up locally, which sends `accumulate` times less. `model` is what `wrap` returned."""
        return nullcontext()

    def step(self, plain: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Clip the averaged gradients, update the weights, and drop the gradients."""
        if self.config.clip_norm > 0:
            # Clipping compares with the true norm, so the loss scale has to be taken out first
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(plain.parameters(), self.config.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    # Checkpoints: all ranks call each of these ----------------------------------------------------------------

    def full_state_dict(self, plain: nn.Module) -> dict[str, torch.Tensor]:
        """The plain state dict with whole tensors; it may be empty on ranks other than 0."""
        return plain.state_dict()

    def optimizer_state(self, plain: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The whole state of the optimizer; it may be empty on ranks other than 0."""
        return optimizer.state_dict()

    def load_optimizer_state(self, plain: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Put back a whole optimizer state, whichever method saved it. Raises ValueError or KeyError where it does
        not fit."""
        numbers = {name: number for number, name in enumerate(parameter_names(plain, optimizer))}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        found = rekeyed(keep_kernels(state, optimizer), numbers)
        optimizer.load_state_dict(laid_out(found, dict(enumerate(parameters))))

    def local_state(self, plain: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """For a sharded checkpoint: {"model": ..., "optimizer": ...} with this rank's DTensors. For methods that split
        the state."""
        raise NotImplementedError

    def load_local_state(self, plain: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Put back what `local_state` returned, whatever the number of ranks was. Raises RuntimeError and others."""
        raise NotImplementedError


# An optimizer's state numbers the parameters where they are whole; FSDP's tools name them instead. A checkpoint of
# either kind loads into the other, so both kinds of keys are translated.


def parameter_names(plain: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the parameters in the order in which the optimizer numbers them."""
    names = {id(parameter): name for name, parameter in plain.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def rekeyed(state: dict[str, Any], keys: dict[Any, Any]) -> dict[str, Any]:
    """The optimizer state with each parameter's key replaced by `keys[key]`; a key that is not in `keys` stays."""
    groups = [{**group, "params": [keys.get(key, key) for key in group["params"]]} for group in state["param_groups"]]
    return {"state": {keys.get(key, key): value for key, value in state["state"].items()}, "param_groups": groups}


def keep_kernels(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The saved state with this optimizer's own choice of a fused kernel: torch has one for whole parameters only, so a
    checkpoint of another method may ask for one that does not exist here. Raises ValueError for other groups."""
    pairs = zip(state["param_groups"], optimizer.param_groups, strict=True)
    return {"state": state["state"], "param_groups": [{**saved, "fused": own["fused"]} for saved, own in pairs]}
