"""`run` with several ranks: they meet, the master's port is the script's, and the end of one is the end of all."""

import json
import os
import re
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.commands.test_run import FACTS, TORCHRUN_SETS, facts, write
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import MAIN, Job, ended, free_port, start
from train.commands.status import look
from train.commands.status_screen import screen
from train.group import join
from train.process.script import END_S

# In the manner of the tutorials: nothing but env://
DDP = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", int(total), "restart", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
"""
# One rank waits for its peer for as long as it takes
HANGS = "\ndist.all_reduce(total)\n"


def launch(folder: Path, script: Path, *options: str, nproc: int = 2) -> Job:
    """One node of `launch` with fresh scripts."""
    words = ("launch", f"--nproc={nproc}", "--command=run", f"--run-dir={folder}/runs", *options)
    return start(sys.executable, MAIN, *words, script)


def test_launch_gives_the_script_its_port_and_keeps_a_log_of_each_rank(tmp_path: Path) -> None:
    with ended(launch(tmp_path, write(tmp_path, DDP + "dist.destroy_process_group()\n" + FACTS))) as job:
        assert job.wait() == [0], job.output
    for rank in (0, 1):
        assert re.search(rf"^\[\S+ r{rank}/2\] sum 2 restart 0$", job.output, re.MULTILINE), job.output
        log = (tmp_path / f"runs/job/logs/rank-{rank}.log").read_text()
        assert re.search(rf" r{rank} sum 2 restart 0$", log, re.MULTILINE)
        assert f" r{1 - rank} " not in log
    first, second = facts(job.output)
    assert first["env"].keys() >= TORCHRUN_SETS
    assert {first["env"]["RANK"], second["env"]["RANK"]} == {"0", "1"}
    assert first["env"]["LOCAL_WORLD_SIZE"] == "2"
    assert first["env"]["GLOO_SOCKET_IFNAME"]
    status = json.loads((tmp_path / "runs/job/status.json").read_text())
    assert (status["state"], [end["code"] for end in status["ranks"].values()]) == ("finished", [0, 0])


def torchrun(folder: Path, script: Path, *options: str) -> Job:
    """One node of torchrun with fresh scripts."""
    command = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", *options)
    env = {"PYTHONWARNINGS": ""}  # torchrun itself may warn
    return start(sys.executable, *command, MAIN, "run", f"--run-dir={folder}/runs", script, env=env)


def test_script_under_torchrun_meets_in_the_agents_store_and_after_a_restart_in_its_own(tmp_path: Path) -> None:
    """The agent's store has the addresses of the first start's ranks then."""
    again = """
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    sys.exit(3)
"""
    script = write(tmp_path, DDP + FACTS + again + HANGS + "dist.destroy_process_group()\n")
    with ended(torchrun(tmp_path, script, "--max-restarts=1")) as job:
        assert job.wait() == [0], job.output
    for restart in (0, 1):
        assert job.output.count(f"sum 2 restart {restart}") == 2
    seen = [found["env"] for found in facts(job.output)]
    assert all(env.keys() >= TORCHRUN_SETS for env in seen)
    assert {(env["TORCHELASTIC_RESTART_COUNT"], env["TORCHELASTIC_USE_AGENT_STORE"]) for env in seen} == {
        ("0", "True"), ("1", "False")
    }
    assert len({env["MASTER_PORT"] for env in seen}) == 2  # the same for all ranks of a start


def test_torchruns_summary_says_how_the_script_failed(tmp_path: Path) -> None:
    script = write(tmp_path, DDP + "if dist.get_rank() == 1: raise ValueError('boom')" + HANGS)
    with ended(torchrun(tmp_path, script)) as job:
        assert job.wait() == [1], job.output
    _, _, summary = job.output.partition("Root Cause")
    assert "job.py failed: ValueError: boom" in summary, job.output


def test_rank_that_never_comes_is_named(forks: Forks, tmp_path: Path) -> None:
    script = write(tmp_path, FACTS)
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    codes, output = forks.run("run", f"--run-dir={tmp_path}/runs", "--join-timeout-s=2", script, env=alone)
    assert codes == [170], output
    assert "rank 1 of 2" in output
    assert "has not joined after 2 s" in output
    assert not facts(output)


def test_each_node_says_who_is_missing_while_it_waits(forks: Forks, tmp_path: Path) -> None:
    words = ("run", f"--run-dir={tmp_path}/runs", "--join-timeout-s=60", write(tmp_path, FACTS))
    with forks.running(*words, world_size=2, env={"WORLD_SIZE": "3", "LOCAL_RANK": "0"}) as job:
        job.wait_for("still waiting: rank 2 of 3", count=2)
        for rank, process in enumerate(job.processes):
            assert re.search(rf"r{rank}/3\] still waiting: rank 2 of 3 .*has not joined after", process.output)


def test_rank_that_reaches_the_masters_port_alone_is_named(forks: Forks, tmp_path: Path) -> None:
    script = write(tmp_path, FACTS)
    codes, output = forks.run(
        "run", f"--run-dir={tmp_path}/runs", "--join-timeout-s=2", script, world_size=2,
        preload="tests.rigs.closed_port:use",
    )
    assert codes == [170, 170], output
    assert re.search(r"rank 1 .*reached .*but not (at )?192\.0\.2\.1:\d+", output), output
    assert "open them all" in output
    assert not facts(output)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("print('another')", "script job.py must be the same on all ranks, got"),
        ("def f(:", "with a syntax error in line 1 (invalid syntax) on rank 1"),
        (None, "and no such file on rank 1"),
    ],
    ids=["another", "syntax", "missing"],
)
def test_nodes_with_different_scripts_are_refused(
    other: str | None, said: str, forks: Forks, tmp_path: Path
) -> None:
    write(tmp_path / "0", FACTS)
    if other is None:
        (tmp_path / "1").mkdir()
    else:
        write(tmp_path / "1", other)
    codes, output = forks.run(
        "run", f"--run-dir={tmp_path}/runs", "job.py", world_size=2, cwds=[tmp_path / "0", tmp_path / "1"]
    )
    assert codes == [2, 2], output
    assert said in output
    assert not facts(output)


@pytest.mark.parametrize("other", ["rate = 2", None], ids=["another", "missing"])
def test_nodes_with_different_modules_of_the_script_are_refused(
    other: str | None, forks: Forks, tmp_path: Path
) -> None:
    for node, text in (("0", "rate = 1"), ("1", other)):
        write(tmp_path / node, "import helpers.net\n" + FACTS)
        write(tmp_path / node / "helpers", "from . import rates", "net.py")
        write(tmp_path / node / "helpers", f"nobody_imports_this = {node}", "unused.py")
        if text is not None:
            write(tmp_path / node / "helpers", text, "rates.py")
    codes, output = forks.run(
        "run", f"--run-dir={tmp_path}/runs", "job.py", world_size=2, cwds=[tmp_path / "0", tmp_path / "1"]
    )
    assert codes == [2, 2], output
    assert "imported helpers/rates.py must be the same on all ranks, got" in output
    assert "unused" not in output
    assert not facts(output)


def test_killed_script_is_started_again_with_all_others(tmp_path: Path) -> None:
    again = """
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    os.kill(os.getpid(), 9)
"""
    script = write(tmp_path, DDP + again + HANGS + "dist.destroy_process_group()\n")
    with ended(launch(tmp_path, script)) as job:
        assert job.wait() == [0], job.output
    assert job.output.count("sum 2 restart 1") == 2
    assert re.search(r"rank 1 ended with 137 \(SIGKILL: .*\), restarted", job.output)
    assert "rank 0 ended with 171, restarted" in job.output
    # What rank 0's script says of its own end, twenty lines of gloo, does not hide the cause
    assert re.search(r"r0/2\] lost a peer: rank 1 on \S+ \(job\.py failed: SIGKILL: ", job.output), job.output
    assert "Traceback" not in job.output
    spent = look(tmp_path / "runs/job", now=time.time())
    assert (spent["goodput"], spent["script"]["attempts"]) == (None, 2)
    assert set(spent["script"]["shares"]) == {"script", "start", "join", "waiting"}
    assert sum(spent["script"]["shares"].values()) == pytest.approx(1, abs=0.001)
    text = screen(spent, now=time.time())
    assert re.search(r"^script +\d+% of .* in 2 attempts: .*start \d+%", text, re.MULTILINE), text
    assert re.search(r"after \d+ s of the script: job\.py failed: SIGKILL: .*\(exit code 137\)", text), text


def test_fault_of_one_rank_ends_all_and_is_not_tried_again(tmp_path: Path) -> None:
    script = write(tmp_path, DDP + "if dist.get_rank() == 1: raise ValueError('boom')" + HANGS)
    with ended(launch(tmp_path, script)) as job:
        assert job.wait() == [1], job.output
    assert "job.py failed: ValueError: boom (exit code 1)" in job.output
    assert "restarted (" not in job.output
    status = json.loads((tmp_path / "runs/job/status.json").read_text())
    assert (status["state"], status["code"]) == ("failed", 1)


def test_rank_that_waits_for_nobody_is_ended_too(forks: Forks, tmp_path: Path) -> None:
    """It would not notice that its peer is gone: it is not in a collective."""
    script = write(tmp_path, "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(600)")
    codes, output = forks.run("run", f"--run-dir={tmp_path}/runs", script, world_size=2)
    assert codes == [7, 7], output
    assert re.search(r"r0/2\] lost a peer: rank 1 on \S+ \(job.py failed\)", output)


def test_code_that_the_user_names_is_tried_again(forks: Forks, tmp_path: Path) -> None:
    script = write(tmp_path, """
import os, sys
print("ARGUMENTS", sys.argv[1:])
sys.exit(75 * (os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))
""")
    words = ("launch", "--nproc=2", "--command=run", "--restart-on=75", f"--run-dir={tmp_path}/runs")
    codes, output = forks.run(*words, "--restart-args=--init_from=resume 'a b'", script, "--lr=1")
    assert codes == [0], output
    assert "ended with 75, restarted" in output
    first, again = "ARGUMENTS ['--lr=1']", "ARGUMENTS ['--lr=1', '--init_from=resume', 'a b']"
    assert (output.count(first), output.count(again)) == (2, 2), output


def test_status_knows_the_run_while_the_script_runs(forks: Forks, tmp_path: Path) -> None:
    script = write(tmp_path, "import time; print('ready', flush=True); time.sleep(600)")
    with forks.running("run", f"--run-dir={tmp_path}/runs", script, world_size=2) as job:
        job.wait_for("ready", count=2)

        def phases() -> set[str]:
            _, text = forks.run("status", "job", "--json", f"--run-dir={tmp_path}/runs")
            ranks = json.loads(text)["ranks"]
            return {rank["phase"] for rank in ranks} if len(ranks) == 2 else set()

        job.wait_until(lambda: phases() == {"script"}, "both ranks in the phase of the script")
        for process in job.processes:
            process.signal("SIGTERM")
        assert job.wait() == [143, 143], job.output


def without_a_link() -> None:
    """Preloaded: ranks on two hosts have no link, and no barrier once torch's group is gone."""
    join.open_link = lambda *_, **__: None  # type: ignore[assignment, misc]


def test_rank_that_has_finished_waits_for_the_others(forks: Forks, tmp_path: Path) -> None:
    script = write(tmp_path, """
import os, pathlib, time
if os.environ["RANK"] == "0":
    while not pathlib.Path("go").exists(): time.sleep(0.05)
print("over")
""")
    words = ("run", f"--run-dir={tmp_path}/runs", script)
    with forks.running(*words, world_size=2, cwds=[tmp_path] * 2, preload=f"{__name__}:without_a_link") as job:
        job.wait_for("over")
        assert not job.processes[1].ended.wait(3), job.output  # it would have ended by then
        (tmp_path / "go").touch()
        assert job.wait() == [0, 0], job.output


@pytest.mark.parametrize(("which", "save_s"), [([0, 1], END_S + 3), ([1], END_S - 2)], ids=["both", "one"])
def test_stop_ends_all_ranks_and_lets_each_save(which: list[int], save_s: float, forks: Forks, tmp_path: Path) -> None:
    """A rank that saves for longer than the others is not cut off by their end; one that nobody asked ends too."""
    script = write(tmp_path, f"""
import os, signal, sys, time
def save(number, frame):
    time.sleep({save_s} if os.environ["RANK"] == "0" else 0)
    print("saved", os.environ["RANK"])
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready")
while True: time.sleep(0.05)
""")
    with forks.running("run", f"--run-dir={tmp_path}/runs", script, world_size=2) as job:
        job.wait_for("ready", count=2)
        for rank in which:
            job.processes[rank].signal("SIGTERM")
        assert job.wait() == [143, 143], job.output
    assert {"saved 0", "saved 1"} <= set(re.findall(r"saved \d", job.output))


def test_stop_of_one_rank_reaches_a_script_that_waits_for_all(forks: Forks, tmp_path: Path) -> None:
    """It exchanges something in its handler, as Lightning's does: no script ends before all were asked."""
    script = write(tmp_path, """
import os, pathlib, signal, sys, time
def save(number, frame):
    pathlib.Path("asked" + os.environ["RANK"]).touch()
    while not all(pathlib.Path(f"asked{rank}").exists() for rank in (0, 1)): time.sleep(0.02)
    print("both were asked")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready")
while True: time.sleep(0.05)
""")
    words = ("run", f"--run-dir={tmp_path}/runs", script)
    with forks.running(*words, world_size=2, cwds=[tmp_path] * 2) as job:
        job.wait_for("ready", count=2)
        job.processes[1].signal("SIGTERM")
        assert job.wait() == [143, 143], job.output
    assert job.output.count("both were asked") == 2, job.output


def test_stop_of_another_rank_is_not_this_ranks_own_first_signal(forks: Forks, tmp_path: Path) -> None:
    """Nodes are drained one after the other, and the first node's stop reaches all scripts."""
    script = write(tmp_path, """
import os, pathlib, signal, sys, time
def save(number, frame):
    print("asked", os.environ["RANK"], flush=True)
    while not pathlib.Path("go").exists(): time.sleep(0.02)
    print("saved", os.environ["RANK"])
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True: time.sleep(0.05)
""")
    words = ("run", f"--run-dir={tmp_path}/runs", script)
    preload, env = "tests.process.test_stop:no_window", {"NOTES_DIR": str(tmp_path)}
    with forks.running(*words, world_size=2, cwds=[tmp_path] * 2, preload=preload, env=env) as job:
        job.wait_for("ready", count=2)
        job.processes[0].signal("SIGTERM")
        job.wait_for("asked", count=2)
        job.processes[1].signal("SIGTERM")
        job.wait_until((tmp_path / "read-1").exists, "note of the signal")
        assert not job.processes[1].ended.wait(2), job.output  # it would have ended by then
        (tmp_path / "go").touch()
        assert job.wait() == [143, 143], job.output
    assert {"saved 0", "saved 1"} <= set(re.findall(r"saved \d", job.output))


NOTICED = """
import os, signal, sys, time
def save(number, frame):
    print("saved", os.environ["RANK"])
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR1, lambda *_: print("noticed", flush=True))
print("ready", flush=True)
while True: time.sleep(0.05)
"""


def test_stop_that_follows_a_notice_reaches_all_scripts(forks: Forks, tmp_path: Path) -> None:
    words = ("run", f"--run-dir={tmp_path}/runs", write(tmp_path, NOTICED))
    preload, env = "tests.process.test_stop:no_window", {"NOTES_DIR": str(tmp_path)}
    with forks.running(*words, world_size=2, preload=preload, env=env) as job:
        job.wait_for("ready", count=2)
        job.processes[1].signal("SIGUSR1")
        job.wait_for("noticed", count=2)
        job.processes[1].signal("SIGTERM")
        assert job.wait(100) == [143, 143], job.output
    assert {"saved 0", "saved 1"} <= set(re.findall(r"saved \d", job.output))


def test_loss_after_a_notice_stops_the_script(forks: Forks, tmp_path: Path) -> None:
    words = ("run", f"--run-dir={tmp_path}/runs", write(tmp_path, NOTICED))
    with forks.running(*words, world_size=2) as job:
        job.wait_for("ready", count=2)
        job.processes[0].signal("SIGUSR1")
        job.wait_for("noticed", count=2)
        job.processes[1].signal("SIGKILL")
        assert job.wait(100) == [143, -9], job.output
    assert "saved 0" in job.processes[0].output


def test_lost_process_of_a_rank_takes_its_script_along(forks: Forks, tmp_path: Path) -> None:
    script = write(tmp_path, "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)")
    with forks.running("run", f"--run-dir={tmp_path}/runs", script, world_size=2) as job:
        job.wait_for("pid ", count=2)
        pids = [int(pid) for pid in re.findall(r"pid (\d+)", job.output)]
        job.processes[1].signal("SIGKILL")
        assert job.wait() == [171, -9], job.output
        psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=30)
        assert not any(os.path.exists(f"/proc/{pid}/exe") for pid in pids)
