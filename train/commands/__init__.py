"""What every command gets: the settings, which rank this process is, and where its run lies. No torch here."""

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from rankup import Program, RankEnv

from ..config import Config
from ..config.options import Request


@dataclass(frozen=True, slots=True)
class Context:
    """`request`: the command line. `program`: this process."""

    config: Config
    request: Request
    program: Program

    @property
    def log(self) -> logging.Logger:
        return self.program.log

    @property
    def launch(self) -> RankEnv:
        """Which rank this is. Raises LaunchError where the environment describes none, which `show` need not know."""
        return self.program.rank_env

    @property
    def run_dir(self) -> Path:
        """The folder of the run: named by the settings, by the scheduler's job, or by what is trained."""
        config = self.config
        dataset = re.sub(r"[^\w.-]+", "-", Path(config.dataset).name.removeprefix("hf:")).strip(".-")  # hf:FOLDER
        default = f"{dataset}-{config.model}" if config.workload == "images" else config.workload.partition(":")[0]
        return self.program.runs_folder(config.run_dir) / (config.name or self.launch.run_name or default)
