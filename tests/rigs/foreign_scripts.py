"""Users' scripts for tests, in tests/rigs/foreign/: how to start each, and the line that it prints at its end."""

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
# Libraries and launchers give warnings of their own. The folder also has a sitecustomize.py
WARN = {"PYTHONWARNINGS": "default", "PYTHONPATH": f"{ROOT}{os.pathsep}{FOLDER}"}
# With torch 2.14.1, 6 of about 80 jobs on a busy machine aborted like this at their very end, if they used gloo, even
# after destroy_process_group and under torchrun alone. Neither the script nor `launch` is at fault
ABORTED = "terminate called without an active exception"
# Preload of a forked process that then runs `python WORDS`: a script, or torchrun, which starts interpreters
BE_SCRIPT = f"{__name__}:be_script"
RESULT = re.compile(r"Result: (world size \d+, weights [0-9a-f]{16})")


# For two processes on one node; {folder} is a new folder, {{rank}} the local rank
ARGUMENTS = {
    "ddp_local_rank": "--local-rank={{rank}}",
    "bert_trainer": "--output-dir {folder}",  # the Trainer is built on Accelerate
    "dcp_checkpoints": "--checkpoint-dir {folder}",
    "imagenet": "--dist-url env://",
}


def words(name: str, folder: Path) -> list[str]:
    """Return the path of the script and its arguments."""
    return [str(FOLDER / f"{name}.py"), *ARGUMENTS.get(name, "").format(folder=folder).split()]


def again_if_aborted(test: Callable[..., Result]) -> Callable[..., Result]:
    """Run the test, or a part of it, up to three times if it fails with ABORTED."""

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
    """Return what a script printed at its end, once, by one rank: the world size and a digest of the weights.

    If a script was started again after ABORTED, all starts must print the same."""
    found = RESULT.findall(output)
    assert len(found) == 1 or (ABORTED in output and len(set(found)) == 1), output
    return str(found[0])


def expected(name: str, once: Once, forks: Forks, folder: Path, *, nproc: int = 2) -> str:
    """Return what a script prints in forked processes with torchrun's variables. test_foreign.py shows, for one of the
    scripts, that torchrun itself gives the same."""

    script = [*words(name, folder / "expected")]
    return once(f"{name}-{nproc}", lambda: result_of(by_forks(forks, *script, folder=folder, nproc=nproc)))


@again_if_aborted
def by_forks(forks: Forks, *script: str, folder: Path, nproc: int) -> str:
    """Return what a script prints in such processes."""
    env = {**WARN, "LOCAL_WORLD_SIZE": str(nproc), "TORCHELASTIC_RUN_ID": "none"}
    return forks.ends(*script, world_size=nproc, cwds=[folder] * nproc, preload=BE_SCRIPT, env=env)


def be_script() -> NoReturn:
    """Run WORDS, see BE_SCRIPT. {rank} in WORDS is the local rank."""
    warnings.simplefilter("default")
    be_python([word.replace("{rank}", os.environ.get("LOCAL_RANK", "")) for word in sys.argv[1:]])
