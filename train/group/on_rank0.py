"""Work that one rank does for all, such as reading a file that only its disk has."""

from collections.abc import Callable
from typing import Any

from train.errors import PeerLost, UserError
from train.group.group import Group


def on_rank0(group: Group, work: Callable[[], Any]) -> Any:
    """Call `work` on rank 0 and return its result, which is pickled, on all ranks. All ranks call this.

    UserError and PeerLost of `work` are raised on all ranks: one that waited for rank 0's result would otherwise wait
    until a deadline. Any other error is a fault: it ends rank 0, and the others lose their peer.
    """
    outcome: tuple[str, Any] = ("", None)
    if group.is_rank0:
        try:
            outcome = ("", work())
        except (UserError, PeerLost) as error:
            outcome = (type(error).__name__, str(error))
    kind, value = group.broadcast(outcome)
    if not kind:
        return value
    raise (PeerLost if kind == "PeerLost" else UserError)(value, printed_elsewhere=not group.is_rank0)
