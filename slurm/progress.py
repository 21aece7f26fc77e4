# Prints where a run stands, for supervise.py: its directory, its newest checkpoint's step, and how its ranks ended.
# Run: slurm/task.sh progress train --epochs 5      (with the words that train.main got)
# Edit: nothing.
"""Prints one line: DIRECTORY STEP CODE SUSPECT.

The code is 0 where no rank of RANKUP_ATTEMPT wrote down that it failed. The suspect is the rank that most of them lost;
-1 where none says so.
"""

import os
import re
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rankup.env.rank_env import read_rank_env
from rankup.errors import root_cause
from train.config import load_config
from train.config.command_line import parse_args
from train.process.context import run_directory
from train.process.status import read_json


def _suspects(attempt: Path) -> list[int]:
    """The ranks that others say they have lost."""
    ends = [read_json(path) or {} for path in attempt.glob("*.json")]
    return [end["suspect"] for end in ends if end.get("suspect") not in (None, end.get("rank"))]


def main(arguments: list[str]) -> None:
    launch = read_rank_env(os.environ)
    parsed = parse_args(arguments)
    config = load_config(parsed.settings, file=parsed.config_file, mistakes=parsed.mistakes)
    run_dir = run_directory(config, launch, parsed.script)
    found = [re.fullmatch(r"step-(\d+)", path.name) for path in (run_dir / "checkpoints").glob("step-*")]
    step = max((int(match[1]) for match in found if match), default=0)
    # The ranks' supervisors number what they start again: ATTEMPT-0, ATTEMPT-1. torchrun's ranks have ATTEMPT itself
    attempt, folder = launch.attempt or "-", run_dir / "status"
    attempts = sorted([*folder.glob(attempt), *folder.glob(f"{attempt}-*")], key=lambda path: path.stat().st_mtime)
    ends = [read_json(path) or {} for newest in attempts[-1:] for path in newest.glob("*.json")]
    # Where a task is lost, the supervisors of the others start their ranks once more before srun stops them
    named = [lost for path in reversed(attempts) if (lost := _suspects(path))]
    suspect = Counter(named[0]).most_common(1)[0][0] if named else -1
    # torchrun stops the other ranks when one has failed
    print(run_dir, step, root_cause([end["code"] for end in ends if end.get("code")], rest_stopped=True), suspect)


if __name__ == "__main__":
    main(sys.argv[1:])
