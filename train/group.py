"""The settings that all ranks must share before they form a group."""

import contextlib
import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from .config import Config


def code_of(*files: Path) -> str:
    """Return a digest of the contents of these files."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


# Computed at import: the fork server may have imported these files days ago, and they may have changed on disk since
CODE = code_of(*sorted(Path(__file__).parent.rglob("*.py")))
# Settings that may differ between ranks: paths, and settings that do not affect the result
OWN = {"data_dir", "run_dir", "tensorboard", "tracker", "num_workers"}


def join_options(config: Config, *, fresh: bool = False) -> dict[str, Any]:
    """Return the arguments that `Program.join` and `Program.doctor` share: `settings`, the texts by name that must be
    equal on all ranks, and `device`."""
    device = None if config.device == "auto" else config.device
    if config.device_ids:  # DataParallel needs the module on the first of its devices
        device = f"cuda:{config.device_ids.split(',')[0]}"
    spec = None
    if ":" in config.workload:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(config.workload.partition(":")[0])
    own = Path(spec.origin or "") if spec else Path()  # not imported yet: read it from disk
    code = CODE + code_of(own) if own.is_file() else CODE  # a module that is built into Python has no file
    settings = {f"setting {name}": json.dumps(value) for name, value in config.model_dump().items() if name not in OWN}
    return {"settings": {"program code": code, **settings, "fresh": str(fresh)}, "device": device}
