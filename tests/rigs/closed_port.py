"""Rank 0's second store, see `train.group.move`, is where nobody reaches it: as behind a firewall."""

from train.group import move


def use() -> None:
    """To be called in each rank before it starts."""
    move.MOVE_S = 2.0
    # An address that is kept for documentation, so no machine has it
    move.choose_interface = lambda me, paths, log: ("eth0", "192.0.2.1")
