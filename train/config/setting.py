"""How settings are declared. No torch here."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Natural = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


class Settings(BaseModel):
    """Base class of settings. They are immutable, and pydantic checks each one by itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def setting(default: Any, help: str, *, free: bool = False, rule: str = "", of: str = "", **limits: Any) -> Any:
    """Declare a field of `Settings` or an option of a command.

    `help`: the line that --help shows. `free`: a resumed run may change this setting, because it does not affect the
    result. `rule`: what the value must be, for error messages; by default pydantic's words. `of`: the choices that use
    this setting, such as `--dataset fake`, joined by "or"; empty: all do. `limits`: pydantic's limits (ge, lt, ...).
    """
    facts: dict[str, Any] = {"free": free, "rule": rule, "of": of}
    return Field(default, description=help, json_schema_extra=facts, **limits)


free = partial(setting, free=True)
path = partial(setting, None, min_length=1, rule="a path")
