"""Somebody's scripts for tests, in tests/rigs/foreign/: how each is started, and the line that it prints at its end."""

import functools
import os
import re
import runpy
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT, ended, free_port, start

Result = TypeVar("Result")
Once = Callable[[str, Callable[[], str]], str]  # the fixture `once`
FOLDER = ROOT / "tests" / "rigs" / "foreign"
# Libraries and launchers give warnings of their own
WARN = {"PYTHONWARNINGS": "default"}
# torch 2.14.1: 6 of about 80 jobs on a busy machine aborted so at their very end, with a group of gloo's, after
# destroy_process_group too, and under torchrun alone as well. That is neither the script's fault nor that of `run`
ABORTED = "terminate called without an active exception"
RESULT = re.compile(r"Result: (world size \d+, weights [0-9a-f]{16})")


@dataclass(frozen=True)
class Script:
    """One script. `arguments`: for two processes on one node; {folder} is a new one."""

    name: str
    arguments: str = ""

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.py"

    def words(self, folder: Path, arguments: str | None = None) -> list[str]:
        text = self.arguments if arguments is None else arguments
        return [str(self.path), *(word.format(folder=folder) for word in text.split())]


SCRIPTS = {
    script.name: script
    for script in (
        Script("before_ddp"),
        Script("ddp_local_rank", "--local-rank={{rank}}"),
        # The Trainer is built on Accelerate
        Script("bert_trainer", "--output-dir {folder}"),
        Script("before_lightning"),
        Script("imagenet", "--dist-url env://"),
        Script("dcp_checkpoints", "--checkpoint-dir {folder}"),
    )
}


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


@again_if_aborted
def by_torchrun(folder: Path, words: Sequence[str | Path]) -> str:
    """The result of two processes under PyTorch's own launcher."""
    port = f"--master-port={free_port()}"
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", port, *words]
    with ended(start(sys.executable, *command, env=WARN, cwd=folder)) as job:
        assert set(job.wait()) == {0}, job.output
    return result_of(job.output)


def expected(script: Script, once: Once, forks: Forks, folder: Path, *, nproc: int = 2) -> str:
    """What a script comes to in processes with torchrun's variables, which are forked from one that has imported torch.
    That torchrun itself leads to the same: test_foreign.py, by one of the scripts."""

    @again_if_aborted
    def by_forks() -> str:
        codes, output = forks.run(
            *script.words(folder / "expected"), world_size=nproc, cwds=[folder] * nproc,
            preload=f"{__name__}:be_script",
            env={**WARN, "LOCAL_WORLD_SIZE": str(nproc), "TORCHELASTIC_RUN_ID": "none"},
        )
        assert codes == [0] * nproc, output
        return result_of(output)

    return once(script.name, by_forks)


def be_script() -> None:
    """The preload of a forked process, which is then `python WORDS`, where {rank} is its local rank."""
    warnings.simplefilter("default")
    sys.argv = [word.replace("{rank}", os.environ.get("LOCAL_RANK", "")) for word in sys.argv[1:]]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()
