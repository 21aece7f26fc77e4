# Prints where a run stands, for supervise.py: its directory, its newest checkpoint's step, and how its ranks ended.
# Run: slurm/task.sh progress train --epochs 5      (with the words that train.main got)
# Edit: nothing.
"""Prints one line: DIRECTORY STEP CODE. The code is 0 where no rank of RANKUP_ATTEMPT wrote down that it failed."""

import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from train.config import load_config
from train.config.command_line import parse_args
from train.errors import root_cause
from train.process.context import run_directory
from train.process.env import read_env
from train.process.status import read_json


def main(arguments: list[str]) -> None:
    launch = read_env(os.environ)
    parsed = parse_args(arguments)
    config = load_config(parsed.settings, file=parsed.config_file, mistakes=parsed.mistakes)
    run_dir = run_directory(config, launch, parsed.script)
    found = [re.fullmatch(r"step-(\d+)", path.name) for path in (run_dir / "checkpoints").glob("step-*")]
    step = max((int(match[1]) for match in found if match), default=0)
    # The ranks' supervisors number what they start again: ATTEMPT-0, ATTEMPT-1. torchrun's ranks have ATTEMPT itself
    attempt, folder = launch.attempt or "-", run_dir / "status"
    attempts = sorted([*folder.glob(attempt), *folder.glob(f"{attempt}-*")], key=lambda path: path.stat().st_mtime)
    ends = [read_json(path) or {} for newest in attempts[-1:] for path in newest.glob("*.json")]
    # torchrun stops the other ranks when one has failed
    print(run_dir, step, root_cause([end["code"] for end in ends if end.get("code")], rest_stopped=True))


if __name__ == "__main__":
    main(sys.argv[1:])
