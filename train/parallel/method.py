"""What a method of training in parallel decides. The loop calls these hooks and knows no method by name."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn

from rankup import Group

from ..config import Config


class Method:
    """A method by which several ranks train one model. What a subclass does not override works as in one process.

    The loop calls the hooks in this order: `refuse`, `running`, `split`, `wrap`, `after_warm_up`; then `micro_batch`
    and `step` in every step. What a checkpoint holds is no matter of the method, see `rankup.loop.tracked`.

    `plain` is always the user's module without wrappers: its names are those in a checkpoint.
    """

    # Whether each rank holds all weights and the whole optimizer state. If not, no single rank can save them or compute
    # their digest without the others.
    replicates_state: ClassVar[bool] = True
    # Whether it needs torch's process group also where there is one rank only.
    needs_process_group: ClassVar[bool] = False
    # Whether a rank trains on one device. If not, one process takes all devices of its node.
    one_device_per_rank: ClassVar[bool] = True
    # Whether the graph of a loss ends in the model's own parameters: then it shows which ones the loss does not use.
    graph_ends_in_parameters: ClassVar[bool] = True

    def __init__(self, config: Config, group: Group) -> None:
        self.config, self.group = config, group
        # What exchanges gradients beside torch, in the middle of backward: its `waited_s` says how long it waited there
        self.exchange: Any = None

    @property
    def every_rank_has_all(self) -> bool:
        """Whether any rank alone can save all that the next attempt needs, at any moment between two changes of the
        weights. If not, a lost rank costs the steps since the newest checkpoint."""
        return self.replicates_state

    def refuse(self) -> None:
        """Raise UserError for what the method can't do with these settings, this device and so many ranks, which have
        met. Settings that exclude each other anywhere are refused earlier, by `train.config`."""

    def running(self) -> AbstractContextManager[None]:
        """What has to be up for the length of the run. Raises JoinError."""
        return nullcontext()

    # Before the first step ------------------------------------------------------------------------------------

    def split(self, plain: nn.Module) -> None:
        """Split the parameters over the ranks, in place, before the optimizer is built on them, and move what this rank
        keeps to the device. Raises UserError.

        The model is the same on all ranks, where it was built. A checkpoint's weights are loaded later.
        """

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module whose forward and backward train with the other ranks. Raises UserError.

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


class OneProcess(Method):
    """The defaults of `Method`. `train.config.check_world_size` refuses several ranks before torch is imported."""

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.config.compress != "none":  # a run that was scaled down keeps its settings
            self.group.log.info("compress  one process sends no gradients: nothing to compress")
        return model
