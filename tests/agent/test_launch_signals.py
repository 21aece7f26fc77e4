"""Signals to `rankup launch`: which ranks get them, which ranks may save, and how the job ends."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rankup.agent.processes import has_handler
from rankup.timing import REPEAT_S
from tests.agent.test_launch import TWO, WAITS, add_node, all_wrote, launch, nodes, pid_of, status, write
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import Job, ended, free_port, lives, start, wait_for

HANDLES = """
def handle(number, _):
    say(signal.Signals(number).name)
    wait_for(f"saved-{rank}")
    sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, handle)
"""


@pytest.mark.parametrize(("sent", "got"), [
    ("SIGTERM", "SIGTERM"), ("SIGINT", "SIGINT"), ("SIGUSR1", "SIGTERM"), ("SIGHUP", "SIGTERM"),
])
def test_signal_reaches_all_ranks_which_may_save(sent: str, got: str, tmp_path: Path) -> None:
    """test_stop_after_a_notice_lets_ranks_save has a script with a handler for SIGUSR1."""
    with ended(launch(tmp_path, HANDLES + WAITS)) as job:
        all_wrote(tmp_path)
        job.processes[0].send_signal(getattr(signal, sent))
        for rank in TWO:
            pid_of(tmp_path, rank, name=got)
            (tmp_path / f"saved-{rank}").touch()
        assert job.wait() == [143], job.output
    assert f"{'SIGTERM' if sent == 'SIGHUP' else sent}: passed on to 2 ranks" in job.output
    assert status(tmp_path)["state"] == "stopped"


CLOSED = """
import os, pty, rankup
master, terminal = pty.openpty()
os.dup2(terminal, 1)
job, count = rankup.init(folder / 'runs/job'), {'n': 0}
job.track(count=count)
os.close(master)
for _ in job.steps(10**6):
    with job.step():
        count['n'] += 1
    print('to nobody', flush=True)
    os.kill(os.getpid(), signal.SIGHUP)
"""


def test_script_that_prints_to_its_closed_terminal_saves_and_stops(forks: Forks, tmp_path: Path) -> None:
    forks.ends("launch", f"--run-dir={tmp_path}/runs", write(tmp_path, CLOSED), code=143)
    assert list((tmp_path / "runs/job/checkpoints").glob("step-*"))
    assert "to nobody" in (tmp_path / "runs/job/logs/rank-0.log").read_text()


def test_job_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    options = ("rankup", "launch", "--no-fork", f"--run-dir={tmp_path}/runs")
    with ended(start("nohup", sys.executable, "-m", *options, write(tmp_path, WAITS))) as job:
        pids = [pid_of(tmp_path, 0), job.processes[0].pid]
        for pid in pids:
            os.kill(pid, signal.SIGHUP)
        (tmp_path / "go").touch()
        assert job.wait() == [0], job.output


def test_script_that_ignores_a_stop_is_killed(tmp_path: Path) -> None:
    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay('here')\nwait_for('never')"
    with ended(launch(tmp_path, text, "--stop-grace-s=0.5")) as job:
        all_wrote(tmp_path)
        job.processes[0].send_signal(signal.SIGTERM)
        assert job.wait() == [143], job.output
    assert "rank 0 did not end within 0.5 s after SIGTERM (--stop-grace-s): killed" in job.output


def test_second_signal_seconds_later_ends_the_job_at_once(tmp_path: Path) -> None:
    text = "signal.signal(signal.SIGINT, lambda *_: say('asked'))\nsay('here')\nwait_for('never')"
    with ended(launch(tmp_path, text, "--stop-grace-s=100000")) as job:
        pids = all_wrote(tmp_path)
        job.processes[0].send_signal(signal.SIGINT)
        all_wrote(tmp_path, name="asked")
        time.sleep(REPEAT_S + 0.2)
        assert job.processes[0].poll() is None
        job.processes[0].send_signal(signal.SIGINT)
        assert job.wait() == [143], job.output
    wait_for("the end of the ranks", lambda: not any(map(lives, pids)))
    assert status(tmp_path)["state"] == "stopped"


def test_stop_signal_to_every_process_counts_once(tmp_path: Path) -> None:
    text = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n" + WAITS
    with ended(launch(tmp_path, text)) as job:
        all_wrote(tmp_path)
        agent = psutil.Process(job.processes[0].pid)
        for process in (agent, *agent.children()):  # the fork server and the ranks
            process.terminate()
        assert job.wait() == [143], job.output
    assert not list(tmp_path.glob("here-*-1"))


def test_stop_after_a_notice_lets_ranks_save(tmp_path: Path) -> None:
    text = "signal.signal(signal.SIGUSR1, lambda *_: say('noticed'))\n"
    text += "signal.signal(signal.SIGTERM, lambda *_: (say('saved'), sys.exit(0)))\n"
    with ended(launch(tmp_path, text + WAITS)) as job:
        for name, after in (("SIGUSR1", "here"), ("SIGTERM", "noticed")):
            all_wrote(tmp_path, name=after)
            job.processes[0].send_signal(getattr(signal, name))
        assert job.wait() == [143], job.output
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0-0", "saved-1-0"}


NOTICED = """
count = 0
def notice(*_):
    global count
    count += 1
    say(f"noticed{count}")
if restart: say("started"), wait_for("ready")
signal.signal(signal.SIGUSR1, notice)
"""


def test_job_goes_on_after_notices_and_restarted_ranks_get_them_too(tmp_path: Path) -> None:
    """A second notice arrives, a lost rank is replaced, and the notice waits for the handler of a new rank."""
    with ended(launch(tmp_path, NOTICED + WAITS)) as job:
        for after in ("here", "noticed1"):
            pids = all_wrote(tmp_path, name=after)
            job.processes[0].send_signal(signal.SIGUSR1)
        all_wrote(tmp_path, name="noticed2")
        os.kill(pids[1], signal.SIGKILL)
        all_wrote(tmp_path, restart=1, name="started")
        (tmp_path / "ready").touch()
        all_wrote(tmp_path, restart=1, name="noticed1")
        (tmp_path / "go").touch()
        assert job.wait() == [0], job.output
    assert status(tmp_path)["state"] == "finished"


@pytest.mark.parametrize("signalled", [[1], [0, 1]])
def test_notice_reaches_each_rank_once_however_many_nodes_got_it(signalled: list[int], tmp_path: Path) -> None:
    with ended(nodes(tmp_path, NOTICED + "say('here')\nwait_for('go')\nsys.exit(3)")) as job:
        all_wrote(tmp_path)
        for node in signalled:
            job.processes[node].send_signal(signal.SIGUSR1)
        all_wrote(tmp_path, name="noticed1")
        for node in TWO:
            (tmp_path / f"node{node}/go").touch()
        assert job.wait() == [3, 3], job.output  # the script's own code counts
    assert not list(tmp_path.glob("node*/noticed2-*"))


@pytest.mark.parametrize("node", TWO)
def test_stop_while_agents_meet_ends_the_job_at_once(node: int, tmp_path: Path) -> None:
    port = free_port()
    with ended(Job()) as job, contextlib.ExitStack() as stack:
        leader = stack.enter_context(socket.create_server(("127.0.0.1", port))) if node else None
        add_node(job, tmp_path, WAITS, node=node, num_nodes=2, port=port)
        wait_for("a handler", lambda: has_handler(job.processes[0].pid, signal.SIGTERM))
        if leader is None:
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            assert stranger.recv(10)
        else:
            stack.enter_context(leader.accept()[0])  # a leader that sends nothing
        job.processes[0].send_signal(signal.SIGTERM)
        assert job.wait() == [143], job.output
    assert "Traceback" not in job.output


def test_first_signal_after_another_nodes_stop_does_not_end_ranks_at_once(tmp_path: Path) -> None:
    with ended(nodes(tmp_path, HANDLES + WAITS)) as job:
        all_wrote(tmp_path)
        job.processes[0].send_signal(signal.SIGTERM)
        all_wrote(tmp_path, name="SIGTERM")
        time.sleep(REPEAT_S + 0.2)
        job.processes[1].send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            job.processes[1].wait(1)  # the agent would have ended by then
        for node in TWO:
            (tmp_path / f"node{node}/saved-{node}").touch()
        assert job.wait() == [143, 143], job.output
