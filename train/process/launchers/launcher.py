"""What env.py asks each launcher, and the helpers to answer it."""

import re
from collections.abc import Mapping

from train.errors import LaunchError
from train.process.placement import FIVE, Found

TORCHRUN = "torchrun -m train.main train ..."


class Launcher:
    """One launcher's knowledge of the environment variables that it sets. By default it knows nothing."""

    def adopt(self, environ: Mapping[str, str]) -> Found | None:
        """RANK is not set: the rank that this launcher's own variables give, or None if it did not start us.

        Raises LaunchError if it did, but its variables do not certainly mean a rank: the job would train alone in
        every process and report success.
        """
        return None

    def complete(self, environ: Mapping[str, str], found: Found) -> None:
        """RANK is set: add to `found` what this launcher knows of the node. Raises LaunchError on a contradiction."""

    def warnings_alone(self, environ: Mapping[str, str]) -> list[str]:
        """No launcher gave a rank: warnings for somebody who expected more than one process."""
        return []

    def run_name(self, environ: Mapping[str, str]) -> str | None:
        """The name of the run: the same after a requeue, another one for each job."""
        return None


def given(environ: Mapping[str, str], launcher: str, names: tuple[str, ...] = FIVE) -> Found:
    """Those of `names` that are set already."""
    values = {name: environ[name] for name in names if name in environ}
    return Found(launcher, values, dict.fromkeys(values, "environment"))


def adopt_names(environ: Mapping[str, str], found: Found, names: Mapping[str, str], origin: str) -> None:
    """Take each variable (key) from the launcher's own one (value).

    Raises LaunchError where an explicit value contradicts it: two launchers are mixed.
    """
    for name, theirs in names.items():
        if theirs in environ:
            if found.values.get(name, environ[theirs]) != environ[theirs]:
                raise LaunchError(
                    f"{name}={found.values[name]} but {theirs}={environ[theirs]}, and RANK is not set: two launchers "
                    f"are mixed. Unset {name}, or set {' '.join(FIVE)} all."
                )
            found.add(name, environ[theirs], origin)


def count(environ: Mapping[str, str], *names: str) -> int | None:
    """The number in the first of `names` that is set and not empty. Raises LaunchError if it is not a number."""
    for name in names:
        if text := environ.get(name):
            if not re.fullmatch(r"[0-9]{1,18}", text):
                raise LaunchError(f"{name} must be a whole number, got {text!r}. Leave it to the scheduler.")
            return int(text)
    return None
