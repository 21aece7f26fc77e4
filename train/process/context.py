"""What every command gets: the settings, which rank this process is, and where its run lies. No torch here."""

from dataclasses import dataclass, replace
from pathlib import Path

from train.config import Config
from train.config.command_line import Request
from train.process.log import Log
from train.process.placement import Launch
from train.process.stop import StopRequest


@dataclass(frozen=True, slots=True)
class Context:
    """`request` is the command line that the settings come from, beside a file."""

    config: Config
    launch: Launch
    run_dir: Path
    log: Log
    stop: StopRequest
    request: Request

    def in_folder(self, name: str) -> "Context":
        """The same in a folder of its own inside the run's, so that the run's status stays the training's."""
        return replace(self, run_dir=self.run_dir / name)


def run_directory(config: Config, launch: Launch) -> Path:
    """Where the run lies: named by the settings, by the scheduler's job, or by what is trained."""
    default = f"{config.dataset}-{config.model}" if config.workload == "images" else config.workload.partition(":")[0]
    return Path(config.run_dir) / (config.name or launch.run_name or default)
