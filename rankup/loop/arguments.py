"""Checks of the arguments that a script gives to `rankup.init` and to a job. Each raises UserError with one line."""

import operator
from collections.abc import Iterable
from typing import Any

from rankup.errors import UserError

LONGEST_S = 10**9  # thirty years: the operating system's clocks can't wait for much longer


def whole_number(where: str, value: Any, *, least: int = 0) -> int:
    """Return a whole number >= `least` as int. A number of numpy or torch is one, True and 2.0 are none."""
    try:
        number = operator.index(value)
    except (TypeError, RuntimeError):  # the latter is torch's
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise UserError(f"{where} must be a whole number >= {least}, got {value!r:.80}. Give it as int.")
    return number


def seconds(where: str, value: Any, *, least: int = 0) -> None:
    if type(value) not in (int, float) or not value >= least:
        raise UserError(f"{where} must be a number of seconds >= {least}, got {value!r:.80}. Change it.")
    if value > LONGEST_S:
        raise UserError(f"{where} must be at most {LONGEST_S:,} seconds, got {value!r:.80}. Change it.")


def switch(where: str, value: Any) -> None:
    """A text such as "False", from a variable of the environment, would mean True."""
    if type(value) is not bool:
        raise UserError(f"{where} must be True or False, got {value!r:.80}.")


def iterable(where: str, value: Any) -> None:
    """The loader of a loop or of an evaluation. A text or a dict would give its characters or keys as batches."""
    known = isinstance(value, Iterable) or hasattr(value, "__getitem__")
    if not known or isinstance(value, str | bytes | dict):
        raise UserError(f"{where} must be a DataLoader or another iterable of batches, got {value!r:.80}.")
