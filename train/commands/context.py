"""What every command gets: the settings, which rank this process is, and where its run lies. No torch here."""

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from rankup.env.rank_env import RankEnv
from rankup.errors import UserError
from rankup.group.stop import StopRequest
from rankup.places.cache import runs_folder

from ..config import Config
from ..config.command_line import Request


@dataclass(frozen=True, slots=True)
class Context:
    """`request`: the command line. `found`: which rank this is, or why it can be none."""

    config: Config
    request: Request
    found: RankEnv | UserError
    log: logging.Logger
    stop: StopRequest

    @property
    def launch(self) -> RankEnv:
        """Which rank this is. Raises LaunchError where the environment describes none, which `show` need not know."""
        if isinstance(self.found, UserError):
            raise self.found
        return self.found

    @property
    def run_dir(self) -> Path:
        """The folder that this command writes to."""
        return run_directory(self.config, self.launch)


def run_directory(config: Config, launch: RankEnv) -> Path:
    """Where the run lies: named by the settings, by the scheduler's job, or by what is trained."""
    dataset = re.sub(r"[^\w.-]+", "-", Path(config.dataset).name.removeprefix("hf:")).strip(".-")  # hf:FOLDER is a path
    default = f"{dataset}-{config.model}" if config.workload == "images" else config.workload.partition(":")[0]
    return runs_folder(config.run_dir) / (config.name or launch.run_name or default)
