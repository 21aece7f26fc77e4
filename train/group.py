"""The group of ranks of this program: what its settings mean for `rankup.group`."""

import contextlib
import importlib.util
import json
import logging
from pathlib import Path

from rankup.agent.status import StatusFile
from rankup.env.rank_env import RankEnv
from rankup.group.group import Group
from rankup.group.joining import code_of, join
from rankup.group.stop import StopRequest

from .config import Config

# As they are imported: a rank may be forked from a process that has imported them days ago
CODE = code_of(Path(__file__).parent)
# Paths may differ from node to node, and so may what is shown
OWN = {"data_dir", "run_dir", "tensorboard", "tracker", "progress", "report_every_s", "num_workers"}


def join_group(
    config: Config, launch: RankEnv, *, log: logging.Logger, stop: StopRequest, status: StatusFile,
    needs_process_group: bool = False,
) -> Group:
    """See `rankup.group.joining.join`."""
    return join(
        launch, settings=same_settings(config), timeout_s=config.join_timeout_s, device=device_of(config),
        backend=backend_of(config), longest_phase_s=longest_phase_s(config), status=status, stop=stop, log=log,
        needs_process_group=needs_process_group,
    )


def same_settings(config: Config) -> dict[str, str]:
    """What has to be the same on all ranks, by name."""
    spec = None
    if ":" in config.workload:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(config.workload.partition(":")[0])
    code = CODE + code_of(Path(spec.origin)) if spec and spec.origin else CODE  # the user's file is not imported yet
    settings = {f"setting {name}": json.dumps(value) for name, value in config.model_dump().items() if name not in OWN}
    return {"program code": code, **settings}


def device_of(config: Config) -> str | None:
    """DataParallel wants the module on the first of its devices."""
    if config.device_ids:
        return f"cuda:{config.device_ids.split(',')[0]}"
    return None if config.device == "auto" else config.device


def backend_of(config: Config) -> str | None:
    """None: torch's default."""
    return None if config.backend == "auto" else config.backend


def longest_phase_s(config: Config) -> float:
    """The longest time limit of any phase."""
    return max(config.setup_timeout_s, config.step_timeout_s, config.eval_timeout_s, config.save_timeout_s)
