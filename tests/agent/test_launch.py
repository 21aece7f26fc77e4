"""`rankup launch` from outside, with scripts that do not know it: command lines, files, processes and several nodes.

The scripts do not import torch, so that a test takes a second."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from rankup import timing
from rankup.agent.logs import host_name
from rankup.agent.processes import cpu_quota
from rankup.explain import diagnose_files
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT, Job, ended, environment, free_port, lives, start, wait_for

HEAD = """
import json, os, pathlib, signal, sys, time
rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
folder = pathlib.Path(__file__).parent
def say(name): (folder / f"{name}-{rank}-{restart}").write_text(str(os.getpid()))
def wait_for(name):
    until_s = time.monotonic() + 240
    while not (folder / name).exists() and time.monotonic() < until_s: time.sleep(0.01)
"""
WAITS = "say('here')\nwait_for('go')\n"
TWO = [0, 1]


def write(folder: Path, text: str) -> Path:
    (folder / "job.py").write_text(HEAD + text)
    return folder / "job.py"


def launch(folder: Path, text: str, *options: str, nproc: int = 2) -> Job:
    """Start the agent of one node. Its script has this text."""
    line = ("-m", "rankup", "launch", f"--nproc={nproc}", f"--run-dir={folder}/runs", *options)
    return start(sys.executable, *line, write(folder, text))


def nodes(folder: Path, text: str, *options: str, num_nodes: int = 2, env: dict[str, str] | None = None) -> Job:
    """Start the agents of several nodes, with one rank each."""
    job, port = Job(), free_port()
    for node in range(num_nodes):
        add_node(job, folder / f"node{node}", text, *options, node=node, num_nodes=num_nodes, port=port, env=env)
    return job


def add_node(
    job: Job, folder: Path, text: str, *options: str, node: int, num_nodes: int, port: int,
    env: dict[str, str] | None = None,
) -> None:
    folder.mkdir(exist_ok=True)
    line = node_line(folder, node=node, num_nodes=num_nodes, port=port)
    start(sys.executable, "-m", "rankup", "launch", *line, *options, write(folder, text), env=env, job=job)


def node_line(folder: Path, *, node: int, num_nodes: int, port: int) -> tuple[str, ...]:
    return (f"--nnodes={num_nodes}", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}",
            f"--run-dir={folder}/runs")


def pid_of(folder: Path, rank: int, restart: int = 0, name: str = "here") -> int:
    """Wait until the rank has written its file, and return the id of its process."""
    path = folder / f"{name}-{rank}-{restart}"
    wait_for(path.name, lambda: path.exists() and path.read_text())
    return int(path.read_text())


def all_wrote(folder: Path, **what: Any) -> list[int]:
    """Wait until both ranks have written their file, each in the folder of its node if there are two nodes. Return the
    ids of their processes."""
    own = [folder / f"node{rank}" for rank in TWO]
    return [pid_of(own[rank] if own[rank].exists() else folder, rank, **what) for rank in TWO]


def status(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "runs/job/status.json").read_text())
    return found


# What a rank gets, and where its output goes --------------------------------------------------------------------------


def set_by_torchrun() -> set[str]:
    """Return the variables that the installed torch sets."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    agent = Path(torch.origin).parent / "distributed/elastic/agent/server/local_elastic_agent.py"
    _, _, table = agent.read_text().partition("worker_env = {")
    names = set(re.findall(r'^ +"([A-Z_]+)":', table.partition("}\n")[0], re.MULTILINE))
    assert len(names) > 10
    return names


def test_current_folder_hides_no_module_from_a_script_elsewhere(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "colorsys.py").write_text("raise SystemExit('of the wrong folder')")
    line = ("launch", f"--run-dir={tmp_path}/runs", f"--work-dir={tmp_path}/work", write(tmp_path, "import colorsys"))
    forks.ends(*line, cwds=[tmp_path / "here"], env={"PYTHONPATH": ""})


@pytest.mark.parametrize("knows_us", [False, True])
def test_rank_gets_torchruns_variables_arguments_and_folder(knows_us: bool, tmp_path: Path) -> None:
    threads = "sys.modules['torch'].get_num_threads() if 'torch' in sys.modules else None"  # from the fork server
    facts = f"{{'argv': sys.argv[1:], 'cwd': os.getcwd(), 'env': dict(os.environ), 'threads': {threads}}}"
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "own.py").touch()
    text = "import rankup\n" * knows_us + f"import own\n(folder / f'facts-{{rank}}').write_text(json.dumps({facts}))"
    given = {"CARPET": "y", "RANKUP_CACHE": "x", "TORCHELASTIC_RUN_ID": "stale",
             "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "PYTHONUNBUFFERED": ""}
    line = ("-m", "rankup", "launch", "--nproc=2", f"--run-dir={tmp_path}/runs", f"--work-dir={tmp_path}/work", "-m")
    bare, words = ("env", "-u", "OMP_NUM_THREADS"), ["--", "--lr", "0.1", *(f"shard-{n:06}" for n in range(90_000))]
    module = write(tmp_path, text).stem  # a module that is not in the folder where the ranks start
    env = {**given, "PYTHONPATH": f"{ROOT}{os.pathsep}library"}
    with ended(start(*bare, sys.executable, *line, module, *words, env=env, cwd=tmp_path)) as job:
        assert job.wait() == [0], job.output
    found = [json.loads((tmp_path / f"facts-{rank}").read_text()) for rank in TWO]
    assert [(each["argv"], each["cwd"]) for each in found] == [(words, str(tmp_path / "work"))] * 2
    first, second = (each["env"] for each in found)
    assert first.keys() >= set_by_torchrun()
    for name, values in {"RANK": ("0", "1"), "LOCAL_RANK": ("0", "1"), "WORLD_SIZE": ("2", "2")}.items():
        assert (first[name], second[name]) == values
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert first["OMP_NUM_THREADS"] == str(num_threads := max(1, int(cpu_quota() // 2)))
    assert found[0]["threads"] == (num_threads if knows_us else None)
    assert first["TORCHELASTIC_USE_AGENT_STORE"] == str(knows_us)
    assert [name for name in given if first.get(name) != given[name]] == [
        *([] if knows_us else ["RANKUP_CACHE"]), "TORCHELASTIC_RUN_ID",
    ]
    ours = {name for name in first if name.startswith(("RANKUP_", "PET_"))}
    assert ours == ({"RANKUP_AGENT", "RANKUP_CACHE"} if knows_us else set())


def test_open_files_are_allowed_as_far_as_the_hard_limit_goes(tmp_path: Path) -> None:
    script = write(tmp_path, "import resource; print('files', resource.getrlimit(resource.RLIMIT_NOFILE))")
    line = (sys.executable, "-m", "rankup", "launch", f"--run-dir={tmp_path}/runs")
    limits = ("sh", "-c", 'ulimit -Sn 500; ulimit -Hn 1900; exec "$@"', "sh")
    with ended(start(*limits, *line, script)) as job:
        assert (job.wait(), "files (1900, 1900)" in job.output) == ([0], True), job.output
    with ended(start(*limits, *line, "--nnodes=1000", "--master-addr=127.0.0.1", script)) as job:
        assert job.wait() == [2]
        assert re.search(r"error: ulimit -n must be at least \d+ for a job of 1000 nodes, got 1900 on ", job.output)
        assert "Traceback" not in job.output


@pytest.mark.parametrize("how", ["plain", "forked"])
def test_order_of_a_set_is_the_same_on_all_ranks_and_after_each_start(how: str, tmp_path: Path) -> None:
    """It numbers the classes in many scripts. The user's own PYTHONHASHSEED wins."""
    text = "import rankup\n" * (how == "forked") + "print('order', list({f'class {n}' for n in range(20)}), flush=True)"
    found = []
    for given in (("-u", "PYTHONHASHSEED"), ("-u", "PYTHONHASHSEED"), ("PYTHONHASHSEED=7",)):
        line = (sys.executable, "-m", "rankup", "launch", "--nproc=2", f"--run-dir={tmp_path}/runs")
        with ended(start("env", *given, *line, write(tmp_path, text))) as job:
            assert job.wait() == [0], job.output
        found.append(set(re.findall(r"order .*", job.output)))
    assert [len(orders) for orders in found] == [1, 1, 1]
    assert found[0] == found[1] != found[2]


def test_job_continues_when_nobody_reads_its_output(tmp_path: Path) -> None:
    text = "print('x' * 100, flush=True)\n" + WAITS + "print('y' * 100000, flush=True)\nif restart == 0: sys.exit(75)"
    with ended(launch(tmp_path, text, "--restart-on=75")) as job:
        pid_of(tmp_path, 0)
        pipe = job.processes[0].stdout
        assert pipe is not None
        pipe.close()
        (tmp_path / "go").touch()
        assert job.processes[0].wait(240) == 0
    assert status(tmp_path)["attempt"].endswith("-1")


def test_last_lines_of_a_rank_reach_its_file_when_nobody_reads_the_terminal(tmp_path: Path) -> None:
    """The rank ends while the agent, which reads its output, waits for the terminal."""
    text = "print(('x' * 99 + '\\n') * 1100, end='')\nraise ValueError('the last line')"
    with ended(Job()) as job:
        job.processes.append(subprocess.Popen(  # nobody reads this pipe
            [sys.executable, "-m", "rankup", "launch", f"--run-dir={tmp_path}/runs", write(tmp_path, text)],
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        ))
        assert job.processes[0].wait(240) == 1
    assert "ValueError: the last line" in (tmp_path / "runs/job/logs/rank-0.log").read_text()
    assert status(tmp_path)["ranks"]["0"]["why"] == "ValueError: the last line"


def test_lines_have_rank_and_host_and_the_file_adds_the_time(tmp_path: Path) -> None:
    """Also if a process that the rank left behind keeps its output open."""
    text = r"""
os.write(1, b"one\n\ntwo \xff")
wait_for("go")
os.write(2, b"careful\n")
print("three\nlast without an end", end="", flush=True)
if rank == 0:
    import subprocess
    (folder / "left").write_text(str(subprocess.Popen(["sleep", "600"], start_new_session=True).pid))
    os._exit(0)
"""
    file, host = tmp_path / "runs/job/logs/rank-1.log", host_name()
    with ended(launch(tmp_path, text)) as job:
        wait_for("a first line", lambda: file.exists() and "one" in file.read_text())
        (tmp_path / "go").touch()
        try:
            assert job.wait() == [0], job.output
        finally:
            os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)
    said = {"one", "two \ufffdthree", "careful"}
    assert {f"[{host} r0/2] {line}" for line in said} <= {*job.output.splitlines()}
    said.add("last without an end")
    assert {f"[{host} r1/2] {line}" for line in said} <= {*job.output.splitlines()}
    lines = [re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d ", "", line) for line in file.read_text().splitlines()]
    assert sorted(lines) == sorted(f"{host} r1 {line}" for line in said)


def test_single_rank_prints_unchanged_and_its_progress_bar_does_not_fill_the_log(tmp_path: Path) -> None:
    text = 'for step in range(1000): sys.stderr.write(f"\\r{step}/1000")\n'
    text += 'sys.stderr.write("\\rall 1000\\r\\nnext\\n")\nsys.stderr.flush()\nos.write(2, b"\\xff")'
    line = [sys.executable, "-m", "rankup", "launch", f"--run-dir={tmp_path}/runs", write(tmp_path, text)]
    done = subprocess.run(line, env=environment(), capture_output=True, check=True, timeout=240)
    assert b"\r998/1000\r999/1000\rall 1000\r\nnext\n\xff" in done.stderr
    lines = (tmp_path / "runs/job/logs/rank-0.log").read_text().splitlines()
    assert [line.partition(" r0 ")[2] for line in lines] == ["all 1000", "next", "\ufffd"]


def test_run_in_an_object_store_has_its_folder_in_the_cache(tmp_path: Path) -> None:
    rankup, where = (sys.executable, "-m", "rankup"), "--run-dir=s3://bucket/runs"
    env = environment({"PYTHONPATH": str(ROOT), "RANKUP_CACHE": str(tmp_path / "cache")})
    for words in (["launch", where, write(tmp_path, "")], ["status", "job", where]):
        done = subprocess.run([*rankup, *words], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert re.search("^state +finished", done.stdout, re.MULTILINE)
    assert {path.name for path in tmp_path.iterdir()} == {"job.py", "cache"}


def test_job_ends_while_the_disk_of_its_run_hangs(forks: Forks, tmp_path: Path) -> None:
    script = write(tmp_path, "wait_for('hangs')")
    forks.ends("launch", "--run-dir", tmp_path / "runs", script, env={"HANGS": f"{tmp_path}/hangs"},
               preload="tests.agent.test_launch:hang_from_the_first_report_on")


def hang_from_the_first_report_on() -> None:
    from rankup.agent import status_files

    write, hangs = status_files.write_json, Path(os.environ["HANGS"])

    def hang(*_: Any) -> None:
        hangs.touch()
        threading.Event().wait()

    status_files.write_atomically = hang  # the report
    status_files.write_json = lambda path, data, **more: hang() if hangs.exists() else write(path, data, **more)


# Ranks that share nothing ---------------------------------------------------------------------------------------------

GROUP = "import torch.distributed as dist\ndist.init_process_group('gloo'{})\ndist.barrier()\n"
NO_GROUP = "job.py: it and the files that it imports name nothing that connects ranks"
ALONE = r"job.py: no rank met another one: each of the 2 ranks did the whole work alone.* mpirun -np 2 python job\.py"


@pytest.mark.parametrize("text", [
    "print('trains')",
    "import rankup\nprint('trains')",  # it never calls rankup.init
    GROUP.format(", rank=0, world_size=1, store=dist.HashStore()"),  # as a script that asks the wrong launcher
    "import types\nsys.modules['mpi4py.MPI'] = types.SimpleNamespace(COMM_WORLD=types.SimpleNamespace(size=1))",
], ids=["one GPU", "rankup", "group of one", "mpi"])
def test_ranks_that_never_met_are_named_in_one_line(text: str, forks: Forks, tmp_path: Path) -> None:
    script = write(tmp_path, text)
    output = forks.ends("launch", "--nproc=2", f"--run-dir={tmp_path}/runs", script)
    assert len(re.findall(ALONE, output)) == 1, output
    # Said at the start only if the text shows it
    assert output.partition("starting job.py")[0].count(NO_GROUP) == text.startswith("print"), output
    one = forks.ends("launch", f"--run-dir={tmp_path}/runs", script)
    assert "no rank met" not in one
    assert NO_GROUP not in one


@pytest.mark.parametrize(("text", "code"), [
    (GROUP.format("") + "dist.destroy_process_group()", 0),
    ("import rankup\n" + GROUP.format(""), 0),
    ("import rankup\nrankup.init(folder / 'runs/job').finish()", 0),
    ("raise ValueError('before they meet')", 1),  # the error says more
], ids=["destroyed", "not by rankup", "rankup", "failed"])
def test_ranks_that_met_are_not_called_alone(text: str, code: int, forks: Forks, tmp_path: Path) -> None:
    output = forks.ends("launch", "--nproc=2", f"--run-dir={tmp_path}/runs", write(tmp_path, text), code=code)
    assert "no rank met" not in output


@pytest.mark.parametrize("knows_us", [False, True])
def test_rank_under_slurm_gets_the_numbers_that_srun_would_give_it(knows_us: bool, tmp_path: Path) -> None:
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_JOB_ID")
    text = "import rankup\n" * knows_us + f"say('-'.join(os.environ.get(name, '') for name in {names}))"
    task = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_NNODES": "1"}
    line = (sys.executable, "-m", "rankup", "launch", "--no-fork", "--nproc=2", f"--run-dir={tmp_path}/runs")
    for env in (task, {}):
        with ended(start(*line, write(tmp_path, text), env=env)) as job:
            assert job.wait() == [0], job.output
    assert {path.name for path in tmp_path.glob("*-[01]-0")} == {"0-0-2-77-0-0", "1-1-2-77-1-0", "----0-0", "----1-0"}


# Ends and restarts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("begin", "cause"), [
    ("print('begun', flush=True)", "stderr: no --data"),
    ("import rankup\nrankup.init(folder / 'runs/job')",
     "RuntimeError: the script ended without job.finish(): no --data"),
    ("import rankup", "SystemExit: no --data"),  # before there is a run
    ("import rankup as r\nr.init(folder / 'runs/job')\nos._exit(0)", "it ended with 0 before it had finished"),
])
def test_exit_of_a_script_has_a_cause(begin: str, cause: str, forks: Forks, tmp_path: Path) -> None:
    script = write(tmp_path, f"{begin}\nsys.exit('no --data')")
    output = forks.ends("launch", f"--run-dir={tmp_path}/runs", script, code=1)
    assert f"ended with 1 ({cause}) (exit code 1)" in output
    if not begin.startswith(("print", "import rankup\n")):
        return
    assert cause in status(tmp_path)["why"]
    assert cause in diagnose_files([tmp_path / "runs/job"])[0].seen


def test_exit_code_of_a_script_with_an_open_job_is_its_own(forks: Forks, tmp_path: Path) -> None:
    script = write(tmp_path, "import rankup\nrankup.init(folder / 'runs/job')\nsys.exit(3)")
    output = forks.ends("launch", f"--run-dir={tmp_path}/runs", script, code=3)
    assert "ended with 3 (SystemExit: 3) (exit code 3)" in output
    assert status(tmp_path)["code"] == 3


def test_rank_that_ends_with_0_while_others_exchange_is_the_cause_and_nothing_is_repeated(
    forks: Forks, tmp_path: Path
) -> None:
    text = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\nsay('here')\n"
    text += "for _ in range(1 if rank == 1 else 2): dist.all_reduce(torch.ones(1))"
    output = forks.ends("launch", "--nproc=3", f"--run-dir={tmp_path}/runs", write(tmp_path, text), code=1)
    why = r"it ended with 0 while rank [02] still exchanged data with it"
    assert re.search(rf"^rank 1 on \S+ ended with 1 \({why}\) \(exit code 1\)$", output, re.MULTILINE), output
    assert not [*tmp_path.glob("here-*-1")]  # no restart
    cause = diagnose_files([tmp_path / "runs/job"])[0]
    assert (cause.title, cause.rank) == ("a rank left the training too early", 1)


def test_exception_of_one_rank_ends_all_and_is_named(tmp_path: Path) -> None:
    text = "say('here')\nif rank == 1: raise MemoryError('boom')\nwait_for('never')"
    with ended(launch(tmp_path, text)) as job:
        assert job.wait() == [1], job.output
    assert job.output.count("Traceback") == 1
    known, last, what_next = job.output.splitlines()[-3:]
    assert known.startswith("this is: the machine's memory was not enough.")
    assert re.fullmatch(r"rank 1 on \S+ ended with 1 \(MemoryError: boom\) \(exit code 1\)", last), job.output
    run = f"{tmp_path}/runs/job"
    assert what_next == f"`rankup explain {run}` says why, `rankup logs {run}` has all lines"
    found = status(tmp_path)
    assert (found["state"], found["code"]) == ("failed", 1)
    assert "MemoryError: boom" in found["why"]
    assert found["ranks"]["1"]["why"] == "MemoryError: boom"


@pytest.mark.parametrize("more", ["", "import rankup\n"])
def test_network_error_of_the_script_itself_is_a_fault_and_no_lost_peer(
    more: str, forks: Forks, tmp_path: Path
) -> None:
    text = f"{more}if rank: raise ConnectionResetError(104, 'Connection reset by peer')\nwait_for('never')"
    output = forks.ends("launch", "--nproc=2", f"--run-dir={tmp_path}/runs", write(tmp_path, text), code=1)
    assert "ended with 1 (ConnectionResetError: [Errno 104] Connection reset by peer) (exit code 1)" in output
    assert "restarted" not in output


@pytest.mark.parametrize("code", [139, 171])
def test_all_ranks_restart_after_a_lost_one(code: int, tmp_path: Path) -> None:
    """The rank that dies waits for the other one, which may start late and must have written its file."""
    text = f"say('here')\nif restart < 2 and rank == 1:\n    wait_for(f'here-0-{{restart}}')\n    os._exit({code})\n"
    text += "if restart < 2: wait_for('never')\n"
    with ended(launch(tmp_path, text + "print('args', sys.argv[1:])", "--restart-args=--resume 'a b'")) as job:
        assert job.wait() == [0], job.output
    assert job.output.count("args ['--resume', 'a b']") == 2
    assert "restarted (1 of 3 attempts without progress)" in job.output
    assert "restarted (2 of 3 attempts without progress)" in job.output
    assert {path.name for path in tmp_path.glob("here-*")} == {f"here-{r}-{n}" for r in TWO for n in range(3)}


def test_restart_arguments_are_given_when_a_run_continues(tmp_path: Path) -> None:
    """Also after its agent was killed, but not after the run has failed or finished."""
    text = "say('with' if sys.argv[1:] == ['--resume'] else 'without')\nsay('here')\n"
    ends = [(WAITS, signal.SIGTERM), (WAITS, signal.SIGKILL), ("sys.exit(1)\n", None), ("", None), ("", None)]
    given = []
    for more, number in ends:
        for name in ("here", "with"):
            (tmp_path / f"{name}-0-0").unlink(missing_ok=True)
        with ended(launch(tmp_path, text + more, "--restart-args=--resume", nproc=1)) as job:
            pid_of(tmp_path, 0)
            if number is not None:
                job.processes[0].send_signal(number)
            job.wait()
        given.append((tmp_path / "with-0-0").exists())
        assert json.loads((tmp_path / "runs/job/lease.json").read_text())["released"] == (number != signal.SIGKILL)
    assert given == [False, True, True, False, False]


def test_rank_that_does_not_end_after_the_others_is_killed(tmp_path: Path) -> None:
    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITS + "if rank: sys.exit(7)\nwait_for('never')"
    with ended(launch(tmp_path, text)) as job:
        all_wrote(tmp_path)
        (tmp_path / "go").touch()
        assert job.wait() == [7], job.output
    assert "rank 0 did not end within 5 s after the others: killed" in job.output
    assert [each.rank for each in diagnose_files([tmp_path / "runs/job"])] == [1]


def test_stopped_rank_is_lost_once_it_is_silent_too_long(forks: Forks, tmp_path: Path) -> None:
    script, preload = write(tmp_path, "import rankup\n" + WAITS), "tests.agent.test_launch:accept_little_silence"
    with forks.running("launch", "--nproc=2", f"--run-dir={tmp_path}/runs", script, preload=preload) as job:
        os.kill([pid_of(tmp_path, rank) for rank in TWO][1], signal.SIGSTOP)
        for rank in TWO:
            pid_of(tmp_path, rank, restart=1)
        (tmp_path / "go").touch()
        assert job.wait() == [0], job.output
    assert re.search(r"rank 1 on \S+ ended with 137 \(sent no heartbeat for 2 s: it was stopped \(SIGSTOP", job.output)


def accept_little_silence() -> None:
    timing.SILENT_S = 2.0


def test_forked_ranks_outlive_their_server_and_end_with_their_agent(forks: Forks, tmp_path: Path) -> None:
    """Their children, the server and the store end with the agent too. The second server is a new interpreter."""
    text = "import rankup, subprocess\nif restart == 0:\n    child = subprocess.Popen(['sleep', '600'])\n"
    text += "    (folder / f'child-{rank}-0').write_text(str(child.pid))\n"
    script = write(tmp_path, text + WAITS)
    with forks.running("launch", "--nproc=2", f"--run-dir={tmp_path}/runs", script) as job:
        pids = [pid for name in ("here", "child") for pid in all_wrote(tmp_path, name=name)]
        agent = psutil.Process(job.processes[0].pid)
        server, = (each for each in agent.children() if each.name() not in ("rank 0", "rank 1", "store"))
        server.kill()
        job.wait_for("the process that forks the ranks was killed")
        assert all(map(lives, pids))
        os.kill(pids[1], signal.SIGKILL)
        all_wrote(tmp_path, restart=1)
        assert not any(map(lives, pids))
        wait_for("five processes", lambda: len(agent.children(recursive=True)) == 5)  # the server forks its next child
        left = agent.children(recursive=True)
        job.processes[0].signal("SIGKILL")
        wait_for("the end of all", lambda: not any(lives(each.pid) for each in left))
        assert job.wait() == [-signal.SIGKILL]


# Several nodes --------------------------------------------------------------------------------------------------------


def test_lost_rank_of_one_node_restarts_the_ranks_of_all_nodes(tmp_path: Path) -> None:
    with ended(nodes(tmp_path, WAITS)) as job:
        os.kill(all_wrote(tmp_path)[1], signal.SIGKILL)
        all_wrote(tmp_path, restart=1)
        for node in TWO:
            (tmp_path / f"node{node}/go").touch()
        assert job.wait() == [0, 0], job.output
    for output in job.outputs:  # each node names the cause
        assert re.search(r"rank 1 on \S+ ended with 137 \(SIGKILL.*restarted \(1 of 3", output), job.output


def test_mistake_of_a_rank_that_met_no_other_is_named_on_each_node(forks: Forks, tmp_path: Path) -> None:
    port, script = free_port(), write(tmp_path, "import rankup\nif rank: rankup.init(__file__)\nwait_for('never')\n")
    jobs = [forks.start("launch", *node_line(tmp_path / f"node{node}", node=node, num_nodes=2, port=port), script)
            for node in TWO]
    assert [job.wait() for job in jobs] == [[2], [2]], "\n".join(job.output for job in jobs)
    for job in jobs:
        said = r"rank 1 on \S+ ended with 2 \(run_dir: \S+/job.py/logs must be writable"
        assert re.search(said, job.output), job.output


def test_missing_node_is_named_on_each_node(tmp_path: Path) -> None:
    job, port = Job(), free_port()
    with ended(job):
        for node in TWO:
            add_node(job, tmp_path / f"node{node}", WAITS, "--join-timeout-s=8", node=node, num_nodes=3, port=port)
        assert job.wait() == [170, 170], job.output
    for output in job.outputs:
        assert re.search(r"rank 2 of 3 .*has not joined after \d+ s \(joined: 0-1 on", output), output
        assert "`rankup logs" not in output  # there is no run yet


def test_nodes_with_different_scripts_are_refused(tmp_path: Path) -> None:
    job, port = Job(), free_port()
    with ended(job):
        for node in TWO:
            add_node(job, tmp_path / f"node{node}", f"print({node})", node=node, num_nodes=2, port=port)
        assert job.wait() == [2, 2], job.output
    assert re.search(r"rank 1 on \S+ \(pid \d+\) differs from rank 0 on .*: script job.py must be ", job.output)
    assert not list(tmp_path.glob("node*/runs"))  # the status of an earlier run is not overwritten


def test_second_job_with_the_same_name_is_refused(tmp_path: Path) -> None:
    with ended(launch(tmp_path, WAITS)) as first, ended(launch(tmp_path, WAITS)) as second:
        agents = [job.processes[0] for job in (first, second)]
        codes = wait_for("an end", lambda: [agent.returncode for agent in agents if agent.poll()])
        assert codes == [2]
        (tmp_path / "go").touch()
        assert sorted([*first.wait(), *second.wait()]) == [0, 2]
    assert "is owned by a live attempt" in first.output + second.output
    with ended(launch(tmp_path, "", f"--run-dir={tmp_path}/go")) as job:
        assert job.wait() == [2], job.output  # the path is a file, and a retry would not help


def test_launch_ends_with_137_when_its_fork_server_is_killed_before_it_is_ready(tmp_path: Path) -> None:
    """Without enough memory to import torch, a second server would end in the same way."""
    (tmp_path / "killer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    script = write(tmp_path, "import rankup\n__preload__ = ['killer']\n")
    with ended(start(sys.executable, "-m", "rankup", "launch", f"--run-dir={tmp_path}/runs", script)) as job:
        assert job.wait() == [137], job.output
    assert "starting the ranks: SIGKILL" in job.output
