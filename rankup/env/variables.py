"""RANK and its companions as strings, and who set each: what a launcher gives before it is checked."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from rankup.errors import LaunchError

FIVE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NAMES = (*FIVE, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
TORCHRUN = "torchrun -m train.main train ..."


@dataclass(slots=True)
class Variables:
    """What `launcher` gave, and what is derived from it. `hint`: where to look for ranks that are missing."""

    launcher: str
    values: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)  # variable -> who set it
    warnings: list[str] = field(default_factory=list)
    hint: str = ""
    outlives_launcher: bool = False  # a launcher that is killed leaves its processes running
    has_horovod_rendezvous: bool = False

    def add(self, name: str, value: object, origin: str) -> None:
        """Set `name` unless it is set: an explicit value beats a derived one. None sets nothing."""
        if value is not None and name not in self.values:
            self.values[name], self.origins[name] = str(value), origin

    def adopt(self, environ: Mapping[str, str], names: Mapping[str, str], origin: str) -> None:
        """Take each variable (key) from the launcher's own one (value).

        Raises LaunchError where an explicit value contradicts it: two launchers are mixed.
        """
        for name, theirs in names.items():
            if theirs in environ and self.values.get(name, environ[theirs]) != environ[theirs]:
                raise LaunchError(
                    f"{name}={self.values[name]} but {theirs}={environ[theirs]}, and RANK is not set: two launchers "
                    f"are mixed. Unset {name}, or set {' '.join(FIVE)} all."
                )
            self.add(name, environ.get(theirs), origin)


def given(environ: Mapping[str, str], launcher: str, names: tuple[str, ...] = FIVE) -> Variables:
    """Those of `names` that are set already."""
    values = {name: environ[name] for name in names if name in environ}
    return Variables(launcher, values, dict.fromkeys(values, "environment"))


def count(environ: Mapping[str, str], *names: str) -> int | None:
    """The number in the first of `names` that is set and not empty. Raises LaunchError if it is not a number."""
    for name in names:
        if text := environ.get(name):
            if not re.fullmatch(r"[0-9]{1,18}", text):
                raise LaunchError(f"{name} must be a whole number, got {text!r}. Leave it to the scheduler.")
            return int(text)
    return None
