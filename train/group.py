"""What the settings mean for the group of ranks."""

import contextlib
import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from .config import Config


def code_of(*files: Path) -> str:
    """A digest of these files."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


# As they are imported: a rank may be forked from a process that has imported them days ago
CODE = code_of(*sorted(Path(__file__).parent.rglob("*.py")))
# Paths may differ from node to node, and so may what is shown
OWN = {"data_dir", "run_dir", "tensorboard", "tracker", "num_workers"}


def join_options(config: Config, *, fresh: bool = False) -> dict[str, Any]:
    """The arguments of `rankup.Program.join` that `doctor` takes too: what has to be the same on all ranks, by name,
    and the device."""
    device = None if config.device == "auto" else config.device
    if config.device_ids:  # DataParallel wants the module on the first of its devices
        device = f"cuda:{config.device_ids.split(',')[0]}"
    spec = None
    if ":" in config.workload:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(config.workload.partition(":")[0])
    code = CODE + code_of(Path(spec.origin)) if spec and spec.origin else CODE  # the user's file is not imported yet
    settings = {f"setting {name}": json.dumps(value) for name, value in config.model_dump().items() if name not in OWN}
    return {"settings": {"program code": code, **settings, "fresh": str(fresh)}, "device": device}
