"""Which settings are columns of TensorBoard's HPARAMS table: those that tell runs apart, not all seventy."""

import json
from typing import Any

from train.config import Config

# What somebody who compares runs asks for first, default or not
ALWAYS = ("workload", "batch_size", "epochs", "max_steps", "optimizer", "lr", "seed")
OF_IMAGES = ("dataset", "model")  # other workloads train on something else
# They say where a run is kept and how it is watched. Its row has its name
NEVER = ("name", "run_dir", "fresh", "mirror", "progress", "advice", "tensorboard", "tracker")


def shown_settings(config: Config, *, method: str, world_size: int) -> dict[str, bool | int | float | str]:
    """ALWAYS, OF_IMAGES, the method of training in parallel, the world size, and whatever differs from its default.

    Free options of an own workload are columns of their own.
    """
    fields = type(config).model_fields
    always = (*ALWAYS, *OF_IMAGES) if config.workload == "images" else ALWAYS
    found: dict[str, Any] = {name: getattr(config, name) for name in always}
    found |= {"parallel": method, "world_size": world_size}
    for name, value in config.model_dump().items():
        if name == "options":
            found |= {f"options.{key}": option for key, option in value.items()}
        elif name not in (*found, *NEVER) and value != fields[name].get_default(call_default_factory=True):
            found[name] = value
    return {name: v if isinstance(v, bool | int | float | str) else json.dumps(v) for name, v in found.items()}
