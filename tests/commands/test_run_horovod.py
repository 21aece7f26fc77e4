"""`run` of a script for Horovod: only where its ranks find each other.

Nothing here needs Horovod: it would be imported after the refusal. Under horovodrun: tests/workloads/test_migrate.py.
"""

from pathlib import Path

import pytest

from rankup.errors import ConfigError
from tests.commands.test_run import write
from tests.rigs.fork_server import Forks
from train.commands.run.program import Program

SCRIPT = "import torch, horovod.torch as hvd\nprint('trains')\n"


def test_horovod_script_is_refused_where_each_rank_would_train_alone(forks: Forks, tmp_path: Path) -> None:
    script = write(tmp_path, SCRIPT)
    codes, output = forks.run("run", f"--run-dir={tmp_path}/runs", script, world_size=2)
    assert codes == [2, 2], output
    assert "job.py: HOROVOD_SIZE must be 2 for its import of horovod, got nothing" in output
    assert "Start it with horovodrun -np 2 --gloo python -m train.main run job.py" in output
    assert "trains" not in output


@pytest.mark.parametrize(
    ("text", "environ"),
    [
        (SCRIPT, {}),
        (SCRIPT, {"HOROVOD_SIZE": "1"}),  # a launcher of several ranks inside horovodrun -np 1
        (SCRIPT, {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_CONTROLLER": "gloo"}),  # settings say nothing of ranks
        ("'''The first line of a script.'''\nfrom horovod import torch as hvd", {}),
    ],
)
def test_script_that_surely_imports_horovod_needs_its_launcher(
    text: str, environ: dict[str, str], tmp_path: Path
) -> None:
    script = Program.find([str(write(tmp_path, text))])
    with pytest.raises(ConfigError, match="HOROVOD_SIZE must be 2"):
        script.check(environ, world_size=2)
    script.check(environ, world_size=1)


@pytest.mark.parametrize(
    ("text", "environ"),
    [
        (SCRIPT, {"HOROVOD_SIZE": "2"}),
        (SCRIPT, {"HOROVOD_CONTROLLER": "mpi"}),
        ("try:\n    import horovod\nexcept ImportError:\n    horovod = None", {}),
        ("def by_horovod():\n    import horovod.torch", {}),
        ("'''\nimport horovod.torch as hvd\n'''", {}),
        ("import horovod_tools", {}),
        ("from .horovod import tools", {}),
        ("import horovod\ndef f(:", {}),
    ],
    ids=["horovodrun", "mpi", "optional", "function", "text", "another", "own", "syntax"],
)
def test_script_that_may_do_without_horovod_is_started(text: str, environ: dict[str, str], tmp_path: Path) -> None:
    Program.find([str(write(tmp_path, text))]).check(environ, world_size=2)
