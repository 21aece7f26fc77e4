"""What a job is told when it is opened."""

from dataclasses import dataclass, field
from typing import Any

from rankup.loop.record import BEGIN_ANEW
from rankup.state.saver import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Options):
    """The arguments of `init`, and what else a program may set that opens its job itself.

    `share_all`: rank 0's buffers of all modules are those of all ranks, not of modules in DDP alone. `can_rescue`: a
    rank that lost another one still holds the whole last commit. `tracker`: mlflow or wandb; it is shown the settings
    `shown`. `begin_anew`, `again`: how the user begins a run anew, and goes on with one, in messages.
    """

    seed: int
    save_every_steps: int | None = None
    log_every_steps: int = 10
    tensorboard: bool = True
    step_timeout_s: float = 600.0
    share_all: bool = False
    can_rescue: bool = True
    tracker: str = "none"
    shown: dict[str, Any] = field(default_factory=dict)
    begin_anew: str = BEGIN_ANEW
    again: str = "The same command"
