"""What a setting is. Data sets, workloads and methods declare their own. No torch here."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Natural = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


class Settings(BaseModel):
    """Settings, each checked by itself, and immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def setting(default: Any, help: str, *, free: bool = False, rule: str = "", of: str = "", **limits: Any) -> Any:
    """A field of Settings, or of a command's options.

    `free`: it may change when a run is resumed, since it does not affect the result. `rule`: what it must be, in place
    of pydantic's words. `of`: the choice of another setting that alone has it, as `--dataset fake`, or several with
    "or" between them. `limits`: pydantic's own (ge, lt, ...).
    """
    facts: dict[str, Any] = {"free": free, "rule": rule, "of": of}
    return Field(default, description=help, json_schema_extra=facts, **limits)


free = partial(setting, free=True)
path = partial(setting, None, min_length=1, rule="a path")
