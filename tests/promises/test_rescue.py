"""No finished step is lost with a rank: the next attempt resumes from the last step that the other ranks hold.

`test_places.py` loses ranks at every place. This file tests what users see: numbers, lines, files, other launchers.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from rankup import timing
from rankup.agent.ends import new_job
from rankup.agent.record import Record
from rankup.state.memory import homes
from tests.rigs import places
from tests.rigs.fork_server import Forks, Job
from tests.rigs.jobs import MAIN, free_port, outcome, rank_env, result
from tests.rigs.places import Fault
from tests.rigs.small_filesystems import own_tmpfs

# 8 steps an epoch. The model has a batch norm, a dropout and several buckets of DDP
SETTINGS = ("--workload=tests.rigs.recording_workload:build", "--options.model=wide", "--limit-train=384",
            "--batch-size=48", "--max-steps=18", "--save-every-steps=5", "--eval-batch-size=16", "--log-every-steps=1",
            "--name=run", "--join-timeout-s=60")


def train(folder: Path, *more: str) -> tuple[str, ...]:
    return ("train", f"--run-dir={folder}", *SETTINGS, *more)


@pytest.fixture(scope="module")
def undisturbed(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    forks.ends(*train(folder), world_size=2)
    return outcome(folder / "run")


@pytest.fixture
def left(tmp_path: Path) -> Iterator[None]:
    """Check at the end of the test that this machine has no rescue of its run."""
    yield
    assert [path for home in homes() for path in home.glob(run_id(tmp_path))] == []


def run_id(folder: Path) -> str:
    return str(json.loads((folder / "run" / "run.json").read_text())["run"])


def launch(
    forks: Forks, folder: Path, *more: str, faults: Path, groups: places.Groups, max_restarts: int = 3
) -> tuple[list[int], str]:
    """Run the job under `launch`. Return the agent's exit code and all output."""
    line = ("launch", "--nproc=2", f"--max-restarts={max_restarts}", MAIN, *train(folder, *more))
    return forks.run(*line, env=places.order(faults, groups))


@pytest.mark.usefixtures("left")
def test_fresh_resumes_from_its_own_rescue_and_never_from_an_earlier_run(
    forks: Forks, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    groups = [[Fault("backward", 1, 3)]]
    codes, output = launch(forks, tmp_path, "--fresh", faults=tmp_path / "first", groups=groups, max_restarts=0)
    assert codes == [137], output
    codes, output = launch(forks, tmp_path, "--fresh", faults=tmp_path / "second", groups=groups)
    assert codes == [0], output
    assert output.count("the earlier run was moved to") == 1
    assert output.count("resumed from step ") == 1
    assert outcome(tmp_path / "run") == undisturbed
    earlier = json.loads((next((tmp_path / "run").glob("before-*")) / "run.json").read_text())["run"]
    for home in homes():
        shutil.rmtree(home / earlier, ignore_errors=True)


def test_fresh_job_killed_before_it_begins_is_still_fresh_after_a_restart(forks: Forks, tmp_path: Path) -> None:
    """The first attempt of a job may be killed before it moves the earlier run aside. Then the next attempt moves it.
    Only the attempts after that must not move the run again."""
    line, record = train(tmp_path, "--max-steps=6", "--fresh"), Record.new()

    def attempt(job: str, restart: int) -> str:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the agent's
        env = {**rank_env(0, 1, store.port), "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
        env["RANKUP_AGENT"] = json.dumps({"job": job, "restarts": restart, "record": record.path})
        return forks.ends(*line, env=env)

    yesterday, today = new_job(), new_job()
    assert "was moved" not in attempt(yesterday, 0)
    assert "is finished" in attempt(yesterday, 1)
    assert "the earlier run was moved" in attempt(today, 1)
    assert "is finished" in attempt(today, 2)
    assert len(list((tmp_path / "run").glob("before-*"))) == 1


def test_stop_during_a_restart_keeps_the_rescue_on_disk(
    forks: Forks, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    """The memory of a pod ends with it, and ranks that have not resumed yet save nothing."""
    groups = [[Fault("backward", 1, 3)], [Fault("before joining", 0, 0, "SIGTERM", "agent")]]
    codes, output = launch(forks, tmp_path, faults=tmp_path / "faults", groups=groups)
    assert codes == [143], output
    assert re.search(r"only in memory: it is now in \S+/run/checkpoints/step-00000002\n", output), output
    run = json.loads((tmp_path / "run/run.json").read_text())["run"]
    for home in homes():
        shutil.rmtree(home / run, ignore_errors=True)
    assert "resumed from step-00000002\n" in forks.ends("launch", "--nproc=2", MAIN, *train(tmp_path))
    assert outcome(tmp_path / "run") == undisturbed


@pytest.mark.usefixtures("left")
def test_damaged_rescue_is_skipped_and_reported(forks: Forks, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    groups = [[Fault("backward", 0, 8, saved=True)]]
    codes, output = launch(forks, tmp_path, faults=tmp_path / "f", groups=groups, max_restarts=0)
    assert codes == [137], output
    (path,) = (path for home in homes() for path in home.glob(f"{run_id(tmp_path)}/*/model.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    shutil.rmtree(tmp_path / "run/checkpoints" / path.parent.name)  # the agent has copied the whole rescue to the disk
    codes, output = launch(forks, tmp_path, faults=tmp_path / "none", groups=[])
    assert codes == [0], output
    assert re.search(r"step \d+, rescued by rank 1 on \S+ was skipped: model.safetensors has ", output)
    assert "resumed from step-00000005" in output
    assert outcome(tmp_path / "run") == undisturbed


KILL = {"PROBE": json.dumps({"where": "loss", "call": 14, "rank": 1, "signal": "SIGKILL"})}  # in step 12
OTHER = ("--workload=tests.rigs.faulting_workload:build", "--batch-size=8", "--max-steps=16", "--save-every-steps=5",
         "--tensorboard=false")


def test_job_continues_from_memory_if_node_0_returns_with_an_empty_disk_before_the_first_checkpoint(
    forks: Forks, tmp_path: Path
) -> None:
    """Node 0's new agent does not know the job, and that of the other node does. Then --fresh does not begin anew."""
    port, there, settings = free_port(), tmp_path / "there", (*OTHER, "--save-every-steps=1000", "--fresh")
    forks.ends(*train(tmp_path / "undisturbed", *settings), world_size=2)

    def start(node: int, **order: Any) -> Job:
        line = ("--nnodes=2", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}")
        env = {"LOCAL_RANK": str(node), **({"PROBE": json.dumps(order)} if order else {})}
        return forks.start("launch", *line, MAIN, *train(tmp_path / f"node{node}", *settings), env=env)

    order = {"where": "loss", "call": 8, "rank": 0, "tell": str(there), "until": "never"}
    other, lost = start(1), start(0, **order)
    lost.wait_until(there.exists, "step 6")
    lost.processes[0].signal("SIGKILL")
    assert lost.wait() == [-9]
    shutil.rmtree(tmp_path / "node0")
    new = start(0)
    assert [*new.wait(), *other.wait()] == [0, 0], new.output + other.output
    assert re.search(r"resumed from step \d, rescued by rank 1 on \S+; no finished step", new.output), new.output
    assert result(tmp_path / "node0/run")["digest"] == result(tmp_path / "undisturbed/run")["digest"]


@pytest.mark.parametrize(
    ("small", "resumed"), [("", "step 11, rescued by rank 0 "), ("shm", "step 11, "), ("shm tmp", "step-00000010")]
)
def test_rescue_falls_back_from_memory_to_tmp_and_then_to_the_checkpoint(
    forks: Forks, tmp_path: Path, small: str, resumed: str
) -> None:
    (tmp_path / "tmp").mkdir()
    env = {"TMPDIR": str(tmp_path / "tmp"), "SMALL": small}
    preload = "tests.promises.test_rescue:small_memory"
    output = forks.ends(*train(tmp_path, *OTHER), world_size=2, env=env | KILL, preload=preload, code=[171, -9])
    line = r"no rescue of step 11, so the run goes on from the checkpoint of step 10: /dev/shm has .*tmp has 0 MiB free"
    assert len(re.findall(line, output)) == (small == "shm tmp"), output
    assert len(list((tmp_path / "tmp").glob("rankup-*/*/step-*"))) == (small == "shm")
    env["SMALL"] = ""
    output = forks.ends(*train(tmp_path, *OTHER), world_size=2, env=env, preload=preload)
    assert f"resumed from {resumed}" in output
    assert list((tmp_path / "tmp").glob("rankup-*/*")) == []


def small_memory() -> None:
    """Preloaded. Make each file system that SMALL names too small for a rescue."""
    tempfile.tempdir = None  # forget the folder that the forking process found without this TMPDIR
    for name in os.environ["SMALL"].split():
        own_tmpfs({"shm": "/dev/shm", "tmp": os.environ["TMPDIR"]}[name], "8k")


SHORT_OF_MEMORY = """
import os, signal, sys, types, torch, rankup
from rankup.state import memory

job = rankup.init(sys.argv[1], tensorboard=False, save_every_steps=0)
job.track(state=(state := {"0": torch.zeros(1)}))
for step in job.steps(6):
    job.gather(0)
    with job.step():
        state["0"] += 1
    mark = f"{sys.argv[1]}.killed-{step}"
    if step in (1, 3) and not os.path.exists(mark):
        if step == 3:
            memory.shutil.disk_usage = lambda path: types.SimpleNamespace(free=0)
        job.gather(0)
        if job.rank == 1:
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
job.finish()
"""


def test_rescue_without_room_names_the_earlier_rescue_from_which_the_run_resumes(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SHORT_OF_MEMORY)
    output = forks.ends("launch", "--nproc=2", tmp_path / "script.py", tmp_path / "run", cwds=[tmp_path])
    assert "no rescue of step 4, so the run goes on from the rescue of step 2: " in output
    assert output.count("resumed from step 2, rescued by rank 0 ") == 2


def test_fsdp_says_once_that_no_rank_can_write_a_rescue(forks: Forks, tmp_path: Path) -> None:
    line = train(tmp_path, *OTHER, "--parallel=fsdp", "--memory-every-steps=0")
    output = forks.ends(*line, world_size=2, env=KILL, code=[171, -9])
    assert output.count("rescue none: no rank has the whole state") == 1
    output = forks.ends(*line, world_size=2)
    assert "resumed from step-00000010" in output


SLOW_RESCUE = """
import os, signal, sys, time, torch, rankup
from rankup.state import copies

job = rankup.init(sys.argv[1], tensorboard=False, save_every_steps=0, compare_every_steps=0)
job.track(state=(state := {str(number): torch.zeros(1) for number in range(20)}))
mark = sys.argv[1] + ".killed"
if not os.path.exists(mark):
    copies.on_write.insert(0, lambda size: time.sleep(0.2))
for step in job.steps(4):
    job.gather(0)
    with job.step():
        state["0"] += 1
    print("did step", step, flush=True)
    if (step, job.rank) == (1, 1) and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
job.finish()
"""


def test_rescue_may_take_as_long_as_it_makes_progress(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SLOW_RESCUE)
    line = ("launch", "--nproc=2", tmp_path / "script.py", tmp_path / "run")
    output = forks.ends(*line, cwds=[tmp_path], preload="tests.promises.test_rescue:leave_at_once")
    assert output.count("rank 0 still writes its state") == 1
    assert "no finished step was lost" in output
    assert sorted(re.findall(r"did step (\d)$", output, re.MULTILINE)) == [*"00112233"]


def leave_at_once() -> None:
    timing.LEAVE_S, timing.UNNOTICED_S = 1.0, 0.1
