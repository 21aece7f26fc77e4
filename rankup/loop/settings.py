"""What a job is told when it is opened: the arguments of `rankup.init`, and more that a program may set."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rankup.loop.record import BEGIN_ANEW
from rankup.state.reading import Check, Copy, no_check


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of `init`, and what else a program may set that opens its job itself.

    `store`: an address below which the run lies too. `mirror`: a folder or an address for second copies. `save`: sync,
    async or auto. `sharded`: ranks write their parts of split state, else rank 0 gathers it. `share_all`: rank 0's
    buffers of all modules are those of all ranks, not of modules in DDP alone. `can_rescue`: a rank that lost another
    one still holds the whole last commit. `tracker`: mlflow or wandb; it is shown the settings `shown`.
    `begin_anew`, `again`: how the user begins a run anew, and goes on with one, in messages.

    `check`: called with path and record of a copy, and once it is read with the tracked state too; raises UserError for
    a copy of another program, ValueError for a damaged one. `fits`: the same, where this attempt may not go on from it.
    `finished`: whether nothing is left to do after a copy, given what `result.json` says.
    """

    seed: int
    fresh: bool = False
    save_every_steps: int | None = None
    keep: int = 2
    log_every_steps: int = 10
    compare_every_steps: int | None = None
    tensorboard: bool = True
    setup_timeout_s: float = 1800.0
    step_timeout_s: float = 600.0
    save_timeout_s: float = 600.0
    memory_every_steps: int | None = None
    store: str = ""
    mirror: str = ""
    save: str = "auto"
    sharded: bool = True
    share_all: bool = False
    can_rescue: bool = True
    tracker: str = "none"
    shown: dict[str, Any] = field(default_factory=dict)
    begin_anew: str = BEGIN_ANEW
    again: str = "The same command"
    check: Check = no_check
    fits: Check = no_check
    finished: Callable[[Copy, dict[str, Any]], bool] = lambda copy, result: False
