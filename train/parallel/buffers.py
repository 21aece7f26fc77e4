"""A model's buffers, such as a batch norm's statistics: the same on all ranks after each step, and kept for a rescue.

A forward pass changes buffers long before the optimizer changes the weights. So a rank that loses its peer in the
middle of a step holds the weights of one step and the buffers of another, unless it has a copy of the buffers.
"""

import torch
import torch.distributed as dist
from torch import nn

from rankup.group.group import Group

BUCKET_BYTES = 250 * 2**20  # DDP's own: tensors up to this size together are sent as one


class Buffers:
    """The buffers of `plain`, the user's module. A model without buffers costs nothing here.

    Horovod, FSDP and a DDP with `broadcast_buffers=False` leave each rank its own buffers: statistics of the samples
    that this rank saw.
    """

    def __init__(self, plain: nn.Module, group: Group) -> None:
        self.group = group
        # The modules' own dictionaries: a forward pass may put another tensor in a buffer's place. To ask the model for
        # its buffers would take half a millisecond of each step for a ResNet-18; DDP does that
        self._holders = [(f"{name}." if name else "", m._buffers) for name, m in plain.named_modules() if m._buffers]
        self._kept: dict[str, torch.Tensor] = {}
        self.keep()

    def share(self) -> None:
        """Give all ranks rank 0's buffers. All ranks call this, at the end of a step's last backward pass.

        DDP would do it before the next forward pass, with the same result for the training. But in between an
        evaluation would see the buffers of several models, and only rank 0 could be rescued.
        """
        buffers = list(self._named().values())
        if not buffers or self.group.world_size == 1:
            return
        self.group.watch.wait_for_others(True)
        with torch.no_grad():
            # What DDP calls: one message for each dtype, in place of one for each of a ResNet's 60 small buffers
            dist._broadcast_coalesced(dist.group.WORLD, buffers, BUCKET_BYTES, 0)  # type: ignore[attr-defined, arg-type]
        self.group.watch.wait_for_others(False)

    def keep(self) -> None:
        """Copy them, as part of finishing a step. On a GPU the copy waits for its turn behind the optimizer's work."""
        buffers = self._named()
        if [b.shape for b in buffers.values()] != [b.shape for b in self._kept.values()]:
            self._kept = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        elif buffers:
            with torch.no_grad():
                torch._foreach_copy_(list(self._kept.values()), list(buffers.values()))

    def kept(self) -> dict[str, torch.Tensor]:
        """The buffers of the last finished step, by name."""
        return self._kept

    def _named(self) -> dict[str, torch.Tensor]:
        return {f"{prefix}{name}": b for prefix, held in self._holders for name, b in held.items() if b is not None}
