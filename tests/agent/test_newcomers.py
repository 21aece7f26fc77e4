"""A node that joins a running job with another script, other arguments or settings is turned away alone."""

import contextlib
import re
from pathlib import Path

from tests.agent.test_launch import TWO, WAITS, add_node, pid_of
from tests.agent.test_membership import Nodes
from tests.promises.test_replay import SCRIPT
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import Job, ended, free_port, wait_for

UNLIKE = r"\(pid \d+\) differs from rank \d on \S+ \(pid \d+\): "


def digest(output: str) -> str:
    (found,) = [word for word in output.split() if len(word) == 64]
    return found


def test_newcomer_that_differs_ends_alone(forks: Forks, tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "2:3", "--wait-for-node=0.5", forks=forks)
    shared, script, job = tmp_path / "shared", tmp_path / "job.py", nodes.job
    script.write_text(SCRIPT.replace("((8, 3), (17, 2))", "((8, 2),)"))

    def turned_away() -> None:
        nodes.add(2)
        assert job.processes[-1].ended.wait(100), job.output
        assert job.processes[-1].code == 2

    with contextlib.ExitStack() as stack:
        stack.callback(job.kill)
        nodes.add(0)
        nodes.add(1)
        wait_for("step 8 of both", lambda: len([*shared.glob("8-*")]) == 2)
        right, nodes.words = nodes.words, (*nodes.words, "--lr=2")
        turned_away()
        turned_away()
        nodes.words, text = right, script.read_text()
        script.write_text(f"{text}\n")
        turned_away()
        script.write_text(text)
        (shared / "go").touch()
        assert job.wait() == [0, 0, 2, 2, 2], job.output
    outputs = [process.output for process in job.processes]
    texts = ["digest of the arguments must be "] * 2 + ["script job.py must be "]
    for output, text in zip(outputs[2:], texts, strict=True):
        assert len(re.findall(UNLIKE + text, output)) == 1, output
    assert outputs[0].count("was turned away, and the job goes on: rank 2 on ") == 3, outputs[0]
    assert len([*shared.glob("run/status/*/")]) == 1, "the ranks were started again"
    (tmp_path / "again").mkdir()
    (tmp_path / "again/go").touch()
    alone = forks.ends("launch", "--nproc=2", f"--run-dir={tmp_path}/again", script, tmp_path / "again")
    assert digest(outputs[0]) == digest(alone)


def test_returning_node_0_with_another_script_ends_alone(tmp_path: Path) -> None:
    """It leads, and leaves the job to the others."""
    job, port = Job(), free_port()
    folders = [tmp_path / name for name in ("0", "1", "other", "right")]
    with ended(job):
        for node in TWO:
            add_node(job, folders[node], WAITS, node=node, num_nodes=2, port=port)
        for node in TWO:
            pid_of(folders[node], node)
        job.processes[0].kill()
        add_node(job, folders[2], f"{WAITS}\n", node=0, num_nodes=2, port=port)
        assert job.processes[2].wait(100) == 2, job.output
        add_node(job, folders[3], WAITS, node=0, num_nodes=2, port=port)
        pid_of(folders[3], 0)
        for folder in folders:
            (folder / "go").touch()
        codes = job.wait()
    assert (codes[1], codes[3]) == (0, 0), job.output
    assert len(re.findall(f"{UNLIKE}script job.py must be ", job.outputs[2])) == 1, job.outputs[2]
    assert "was turned away" in job.outputs[1]
