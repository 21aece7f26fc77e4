"""Somebody's scripts for tests, in tests/rigs/foreign/: how each is started, and the line that it prints at its end."""

import functools
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rankup.agent.processes import be_python
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT

Result = TypeVar("Result")
Once = Callable[[str, Callable[[], str]], str]  # the fixture `once`
FOLDER = ROOT / "tests" / "rigs" / "foreign"
# Libraries and launchers give warnings of their own. The folder has a sitecustomize.py too
WARN = {"PYTHONWARNINGS": "default", "PYTHONPATH": f"{ROOT}{os.pathsep}{FOLDER}"}
# torch 2.14.1: 6 of about 80 jobs on a busy machine aborted so at their very end, with a group of gloo's, after
# destroy_process_group too, and under torchrun alone as well. That is neither the script's fault nor that of `run`
ABORTED = "terminate called without an active exception"
# The preload of a forked process that is then `python WORDS`, such as a script, or torchrun, whose ranks start afresh
BE_SCRIPT = f"{__name__}:be_script"
RESULT = re.compile(r"Result: (world size \d+, weights [0-9a-f]{16})")


# For two processes on one node; {folder} is a new one, {{rank}} the local rank
ARGUMENTS = {
    "ddp_local_rank": "--local-rank={{rank}}",
    "bert_trainer": "--output-dir {folder}",  # the Trainer is built on Accelerate
    "dcp_checkpoints": "--checkpoint-dir {folder}",
    "imagenet": "--dist-url env://",
}


def words(name: str, folder: Path) -> list[str]:
    """The script of that name and its arguments."""
    return [str(FOLDER / f"{name}.py"), *ARGUMENTS.get(name, "").format(folder=folder).split()]


def again_if_aborted(test: Callable[..., Result]) -> Callable[..., Result]:
    """The test, or a part of it, up to three times where it fails by ABORTED."""

    @functools.wraps(test)
    def repeated(*arguments: Any, **named: Any) -> Result:
        for _ in range(2):
            try:
                return test(*arguments, **named)
            except AssertionError as error:
                if ABORTED not in str(error):
                    raise
        return test(*arguments, **named)

    return repeated


def result_of(output: str) -> str:
    """What a script printed of its end: the world size and a digest of the weights. One rank prints it, once.

    Where a script was started again after ABORTED, each start has to come to the same.
    """
    found = RESULT.findall(output)
    assert len(found) == 1 or (ABORTED in output and len(set(found)) == 1), output
    return str(found[0])


def expected(name: str, once: Once, forks: Forks, folder: Path, *, nproc: int = 2) -> str:
    """What a script comes to in processes with torchrun's variables, which are forked from one that has imported torch.
    That torchrun itself leads to the same: test_foreign.py, by one of the scripts."""

    script = [*words(name, folder / "expected")]
    return once(f"{name}-{nproc}", lambda: result_of(by_forks(forks, *script, folder=folder, nproc=nproc)))


@again_if_aborted
def by_forks(forks: Forks, *script: str, folder: Path, nproc: int) -> str:
    """What a script prints in such processes."""
    env = {**WARN, "LOCAL_WORLD_SIZE": str(nproc), "TORCHELASTIC_RUN_ID": "none"}
    return forks.ends(*script, world_size=nproc, cwds=[folder] * nproc, preload=BE_SCRIPT, env=env)


def be_script() -> NoReturn:
    """See BE_SCRIPT. {rank} in WORDS is the local rank."""
    warnings.simplefilter("default")
    be_python([word.replace("{rank}", os.environ.get("LOCAL_RANK", "")) for word in sys.argv[1:]])
