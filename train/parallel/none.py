"""none: one process trains on one device."""

from torch import nn

from .method import Method


class OneProcess(Method):
    """The defaults of `Method`. `train.config.check_world_size` refuses several ranks before torch is imported."""

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.config.compress != "none":  # a run that was scaled down keeps its settings
            self.group.log.info("compress  one process sends no gradients: nothing to compress")
        return model
