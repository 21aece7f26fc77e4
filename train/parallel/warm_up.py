"""A throwaway pass before the first step, on every start.

DDP's first backward pass finds out in which order the gradients become ready, and DDP rebuilds its buckets in that
order when the next forward pass begins. Other buckets mean another order of sums on three or more ranks. Without the
warm-up the first step after a resume would use the first buckets, where the uninterrupted run used the rebuilt ones:
their last bits would differ. One pass is enough: the forward pass of the first step rebuilds the buckets, and its
backward pass uses them already. Most memory and kernels are set up on the way.
"""

from collections.abc import Callable

import torch
from torch import nn

from rankup import UserError


def warm_up(
    plain: nn.Module, loss: Callable[[], torch.Tensor], *, unused_allowed: bool, graph_ends_in_parameters: bool = True
) -> None:
    """Run `loss()`, a scalar, forward and backward once. Then put back the buffers of `plain` and drop its
    gradients.

    Raises UserError naming parameters without a gradient, unless `unused_allowed`: DDP waits for their gradients, and
    says so a step later, by number.
    """
    buffers = {name: buffer.detach().clone() for name, buffer in plain.named_buffers()}
    value = loss()
    if not unused_allowed and graph_ends_in_parameters:
        _refuse_unused(_not_in_graph(plain, value))  # before backward, in which DDP would wait
    value.backward()  # type: ignore[no-untyped-call]
    if not unused_allowed and not graph_ends_in_parameters:
        _refuse_unused([name for name, p in plain.named_parameters() if p.requires_grad and p.grad is None])
    with torch.no_grad():
        for name, buffer in plain.named_buffers():
            buffer.copy_(buffers[name])
    for parameter in plain.parameters():
        parameter.grad = None


def _not_in_graph(plain: nn.Module, loss: torch.Tensor) -> list[str]:
    """Names of the trained parameters that the loss does not depend on."""
    named = {id(p): name for name, p in plain.named_parameters() if p.requires_grad}
    seen, stack = set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # the node of a leaf, which accumulates a parameter's gradient
            named.pop(id(node.variable), None)
        stack.extend(follower for follower, _ in node.next_functions)
    return list(named.values())


def _refuse_unused(names: list[str]) -> None:
    if names:
        raise UserError(
            f"the loss must depend on every parameter, got none from {', '.join(names[:8])}. Freeze them "
            "(requires_grad=False), or set --find-unused-parameters, which is slower."
        )
