"""`run`: a script of the user's as one rank: what it finds, what is kept of it, and how its end is told."""

import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from rankup.env.rank_env import RankEnv
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import MAIN, ended, start
from tests.run.test_run_directory import as_user
from train.config.command_line import parse_args
from train.process.script_env import Place, places, script_environment

# What Python gives a main program, and the environment, as one line of JSON
FACTS = """
import json, os, sys
print("FACTS", json.dumps({"name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0],
                           "env": dict(os.environ), "cwd": os.getcwd()}))
"""
# Not a variable's value: what torchrun sets depends on who asks
TORCHRUN_SETS = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS",
}


def write(folder: Path, text: str, name: str = "job.py") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def facts(output: str) -> list[dict[str, dict[str, str]]]:
    return [json.loads(found) for found in re.findall(r"FACTS (\{.*\})", output)]


# The command line ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "script", "settings"),
    [
        ("run --name x job.py --name y --help", ["job.py", "--name", "y", "--help"], {"name": "x"}),
        ("run -m package.job --a 1", ["-m", "package.job", "--a", "1"], {}),
        ("run -- -odd.py a", ["-odd.py", "a"], {}),
        ("run --simulated-nodes job.py -- b", ["job.py", "--", "b"], {"simulated_nodes": "true"}),
        ("launch --nproc 2 --command run -- job.py --nproc 3", ["job.py", "--nproc", "3"], {}),
        ("launch --command=run --nproc 2 job.py", ["job.py"], {}),
        ("--name x supervise --command run -m job", ["-m", "job"], {"name": "x"}),
        ("run --no-simulated-nodes job.py --a", ["job.py", "--a"], {"simulated_nodes": "false"}),
        ("launch --command run --no-preflight job.py", ["job.py"], {}),
    ],
)
def test_everything_from_the_script_on_is_the_scripts(line: str, script: list[str], settings: dict[str, str]) -> None:
    request = parse_args(line.split())
    assert (request.script, request.settings, request.mistakes, request.help) == (script, settings, [], False)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run", "run must be followed by a script"),
        ("launch --command run", "run must be followed by a script"),
        ("run --lr 0.1 job.py", "--lr must stand behind the script"),
        ("supervise --command doctor --restart-on 1", "--restart-on must be used with --command run"),
        ("launch --command run --restart-on 2 job.py", "--restart-on must name neither"),
        ("launch --command run --restart-on x job.py", "--restart-on must be exit codes"),
        ("launch --command run --init-method file:///tmp/x job.py", "--init-method must be tcp"),
        ("run --restart-args='a job.py", "--restart-args must be words as a shell splits them"),
    ],
)
def test_mistake_in_the_line_is_named(line: str, message: str) -> None:
    assert message in "\n".join(parse_args(line.split()).mistakes)


# What the script finds -----------------------------------------------------------------------------------------------


def test_places_of_ranks_on_their_nodes() -> None:
    two_each = places(["a", "a", "b", "b"], [0, 1, 0, 1], restarts=2, port=7)
    assert two_each == [Place(node, 2, 2, 2, 7) for node in (0, 0, 1, 1)]
    # Started by hand, all with LOCAL_RANK=0
    assert places(["a", "a"], [0, 0], restarts=0, port=7) == [Place(0, 2, 1, 0, 7), Place(1, 2, 1, 0, 7)]
    assert [place.local_world_size for place in places(["a", "b", "b"], [0, 0, 1], restarts=0, port=7)] == [1, 2, 2]


def test_environment_has_every_variable_of_torchrun_and_none_of_ours(tmp_path: Path) -> None:
    launch = RankEnv(
        rank=3, local_rank=1, world_size=4, local_world_size=2, num_nodes=2, node_rank=1, launcher="launch",
        max_restarts=5,
    )
    outside = {"RANKUP_ATTEMPT": "x", "TORCHELASTIC_RUN_ID": "stale", "HOME": "/h", "OMP_NUM_THREADS": "7"}
    env = script_environment(
        outside, launch, Place(0, 1, 4, 2, 29400), run_id="job", error_file=tmp_path / "error"
    )
    assert env.keys() >= TORCHRUN_SETS
    assert not any(name.startswith("RANKUP_") for name in env)
    told = {name: env[name] for name in ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_RANK", "HOME")}
    assert told == {
        "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "ROLE_RANK": "3", "HOME": "/h"
    }
    assert (env["TORCHELASTIC_RUN_ID"], env["OMP_NUM_THREADS"]) == ("job", "7")
    assert (env["TORCHELASTIC_RESTART_COUNT"], env["TORCHELASTIC_MAX_RESTARTS"]) == ("2", "5")
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "False"


def test_script_alone_is_a_main_program_like_any_other(forks: Forks, tmp_path: Path) -> None:
    script = write(tmp_path / "code", FACTS)
    codes, output = forks.run("run", f"--run-dir={tmp_path}", "code/job.py", "--lr", "0.1", cwds=[tmp_path])
    assert codes == [0], output
    [seen] = facts(output)
    assert (seen["name"], seen["file"], seen["path"]) == ("__main__", str(script), str(script.parent))
    assert seen["argv"] == [str(script), "--lr", "0.1"]
    assert (seen["env"]["RANK"], seen["env"]["WORLD_SIZE"], seen["cwd"]) == ("0", "1", str(tmp_path))
    assert int(seen["env"]["MASTER_PORT"]) > 0

    # What it leaves: named by the script, as a training's
    status = json.loads((tmp_path / "job" / "status.json").read_text())
    assert (status["state"], status["code"], status["ranks"]["0"]["code"]) == ("finished", 0, 0)
    log = (tmp_path / "job" / "logs" / "rank-0.log").read_text()
    assert re.search(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d \S+ r0 FACTS ", log, re.MULTILINE)


def test_module_runs_in_the_folder_that_was_asked_for(forks: Forks, tmp_path: Path) -> None:
    write(tmp_path / "package", FACTS, "inner.py")
    write(tmp_path / "package", "", "__init__.py")
    words = ("run", f"--run-dir={tmp_path}", f"--work-dir={tmp_path}/made", "-m", "package.inner", "a")
    codes, output = forks.run(*words, cwds=[tmp_path], env={"PYTHONPATH": str(tmp_path)})
    assert codes == [0], output
    assert facts(output)[0]["cwd"] == f"{tmp_path}/made"
    assert (tmp_path / "package.inner" / "status.json").exists()


@pytest.mark.parametrize(
    ("options", "arguments", "expected"),
    [
        ((), (), ["--local_rank=1"]),
        ((), ("--local_rank", "5"), ["--local_rank", "5"]),
        (("--pass-local-rank=no",), (), []),
        (("--pass-local-rank=local-rank",), ("-x",), ["--local-rank=1", "-x"]),
    ],
)
def test_local_rank_is_an_argument_where_the_script_declares_it(
    options: tuple[str, ...], arguments: tuple[str, ...], expected: list[str], tmp_path: Path
) -> None:
    from train.commands.run.program import Program

    script = write(tmp_path, 'parser.add_argument("--local_rank", type=int)')
    asked = parse_args(["run", *options, str(script), *arguments])
    words = Program.find(asked.script).command(local_rank=1, option=asked.options.pass_local_rank)  # type: ignore[attr-defined]
    assert words == [str(script), *expected]


def test_neighbour_of_the_script_that_cannot_be_read_is_no_fault(tmp_path: Path) -> None:
    script = write(tmp_path, "import json, helpers")
    write(tmp_path / "json", "", "__init__.py")
    write(tmp_path, "", "helpers.py").chmod(0)
    (tmp_path / "json").chmod(0)
    asks = "import sys; from train.commands.run.program import Program; print(Program.find(sys.argv[1:]).must_match())"
    done = as_user(65534, sys.executable, "-c", asks, script)
    (tmp_path / "json").chmod(0o700)
    assert done.returncode == 0, done.stderr
    assert """'imported helpers.py': "can't be read\"""" in done.stdout


# How it ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("import sys; sys.exit(3)", 3, "job.py failed (exit code 3)"),
        ("raise ValueError('boom')", 1, "job.py failed: ValueError: boom (exit code 1)"),
        (
            "import argparse; argparse.ArgumentParser().parse_args(['-x'])", 2,
            "error: job.py failed: job.py: error: unrecognized arguments: -x",
        ),
        ("def f(:", 1, "SyntaxError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL: "),
        ("import ctypes; ctypes.string_at(0)", 139, "SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", 143, "somebody sent SIGTERM to job.py"),
        ("import torch; torch.load('x.pt', weights_only=True)", 1, "FileNotFoundError"),
    ],
    ids=["code", "exception", "usage", "syntax", "killed", "crash", "terminated", "library"],
)
def test_every_end_has_its_code_and_reason(text: str, code: int, said: str, forks: Forks, tmp_path: Path) -> None:
    script = write(tmp_path, text)
    codes, output = forks.run("run", f"--run-dir={tmp_path}/runs", script)
    assert codes == [code], output
    assert said in output
    assert json.loads((tmp_path / "runs/job/status.json").read_text())["code"] == code


def test_known_fault_is_explained(forks: Forks, tmp_path: Path) -> None:
    script = write(tmp_path, "raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')")
    codes, output = forks.run("run", f"--run-dir={tmp_path}/runs", script)
    assert codes == [1]
    assert "this is: " in output


@pytest.mark.parametrize("command", [("run",), ("launch", "--nproc=2", "--command=run")], ids=["run", "launch"])
def test_missing_script_is_the_users_mistake_and_leaves_no_run(
    command: tuple[str, ...], forks: Forks, tmp_path: Path
) -> None:
    codes, output = forks.run(*command, f"--run-dir={tmp_path}/runs", tmp_path / "none.py")
    assert codes == [2], output
    assert re.search(r"error: SCRIPT must be a file, got \S*none\.py", output)
    assert not (tmp_path / "runs").exists()


def test_refused_command_leaves_the_status_of_a_finished_run(forks: Forks, tmp_path: Path) -> None:
    words = ("run", f"--run-dir={tmp_path}/runs", "--name=one", write(tmp_path, "print('done')"))
    assert forks.run(*words)[0] == [0]
    before = (tmp_path / "runs/one/status.json").read_text()
    write(tmp_path / "0", "")
    (tmp_path / "1").mkdir()
    refused = ("run", f"--run-dir={tmp_path}/runs", "--name=one", "job.py")
    codes, output = forks.run(*refused, world_size=2, cwds=[tmp_path / "0", tmp_path / "1"])
    assert codes == [2, 2], output
    assert (tmp_path / "runs/one/status.json").read_text() == before
    # The script's own 2 is an end of the run
    write(tmp_path, "import sys; sys.exit(2)")
    assert forks.run(*words)[0] == [2]
    assert json.loads((tmp_path / "runs/one/status.json").read_text())["state"] == "failed"


@pytest.mark.parametrize(
    ("name", "handles", "sent"),
    [("SIGTERM", "SIGTERM", "SIGTERM"), ("SIGUSR1", "SIGUSR1", "SIGUSR1"), ("SIGUSR1", "SIGTERM", "SIGTERM"),
     ("SIGINT", "SIGINT", "SIGINT")],
)
def test_signal_is_passed_on_and_the_script_may_save(
    name: str, handles: str, sent: str, forks: Forks, tmp_path: Path
) -> None:
    script = write(tmp_path, f"""
import signal, sys, time
def save(number, frame):
    print("saved on", signal.Signals(number).name)
    sys.exit(0)
signal.signal(signal.{handles}, save)
print("ready")
while True: time.sleep(0.05)
""")
    with forks.running("run", f"--run-dir={tmp_path}/runs", script) as job:
        job.wait_for("ready")
        job.processes[0].signal(name)
        # Although it ended with 0: it was stopped, and has not finished
        assert job.wait() == [143], job.output
    assert f"saved on {sent}" in job.output
    assert json.loads((tmp_path / "runs/job/status.json").read_text())["state"] == "stopped"


IGNORES = """
import signal, time
def save(number, frame):
    while True: time.sleep(600)
signal.signal(signal.SIGTERM, save)
print("ready")
while True: time.sleep(600)
"""


def test_script_that_ignores_a_stop_is_located_and_killed(forks: Forks, tmp_path: Path) -> None:
    script = write(tmp_path, IGNORES)
    with forks.running("run", f"--run-dir={tmp_path}/runs", "--stop-grace-s=14", script) as job:
        job.wait_for("ready")
        job.processes[0].signal("SIGTERM")
        assert job.wait() == [143], job.output
    assert re.search(r"s after SIGTERM the script still runs: job\.py:4 save", job.output), job.output
    assert "the script did not end within 14 s of SIGTERM: killed (--stop-grace-s)" in job.output


def hung_disk() -> None:
    """Preloaded: whoever asks where the script is gets no answer."""
    from train.commands.run import run

    run.SAY_S, run.stack_requests.ask = 0.2, lambda *_, **__: time.sleep(600)  # type: ignore[assignment]


def test_script_that_ignores_a_stop_is_killed_although_the_disk_hangs(forks: Forks, tmp_path: Path) -> None:
    words = ("run", f"--run-dir={tmp_path}/runs", "--stop-grace-s=1", write(tmp_path, IGNORES))
    with forks.running(*words, preload=f"{__name__}:hung_disk") as job:
        job.wait_for("ready")
        job.processes[0].signal("SIGTERM")
        assert job.wait(100) == [143], job.output
    assert "the script did not end within 1 s of SIGTERM: killed" in job.output


def test_restart_args_wait_for_a_first_start_of_the_script(forks: Forks, tmp_path: Path) -> None:
    script = write(tmp_path, "import sys; print('ARGUMENTS', sys.argv[1:])")
    for restart, arguments in ((1, []), (2, ["--again"])):  # attempt 0 lost a rank while they joined
        env = {"RANKUP_ATTEMPT": f"20260101T000000-abcdef-{restart}", "RANKUP_RESTART": str(restart)}
        words = ("run", f"--run-dir={tmp_path}/runs", "--restart-args=--again", script)
        codes, output = forks.run(*words, env=env)
        assert codes == [0], output
        assert f"ARGUMENTS {arguments}" in output


def test_progress_bar_does_not_fill_the_log(forks: Forks, tmp_path: Path) -> None:
    script = write(tmp_path, """
import sys
for step in range(1000): sys.stderr.write(f"\\r{step}/1000")
sys.stderr.write("\\rall 1000\\nnext\\n")
print("last without an end", end="")
""")
    job = forks.start("run", f"--run-dir={tmp_path}/runs", script)
    assert job.wait() == [0], job.output
    # Alone, a bar stays a bar
    assert b"\r998/1000\r999/1000\rall 1000\n" in job.processes[0].output_file.read_bytes()
    log = (tmp_path / "runs/job/logs/rank-0.log").read_text()
    lines = [line.split(" r0 ")[1] for line in log.splitlines()]
    assert [line for line in lines if "1000" in line or "next" in line] == ["all 1000", "next"]
    assert "last without an end" in lines


def test_processes_that_the_script_starts_by_spawn_find_its_functions(forks: Forks, tmp_path: Path) -> None:
    script = write(tmp_path, """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp

def work(rank, size, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"sum {int(total)}")  # one write: two processes print at once
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, args=(2, int(os.environ["MASTER_PORT"])), nprocs=2)
""")
    codes, output = forks.run("run", f"--run-dir={tmp_path}/runs", script)
    assert codes == [0], output
    assert output.count("sum 2") == 2


def test_two_runs_of_one_name_are_refused(forks: Forks, tmp_path: Path) -> None:
    script = write(tmp_path, "import time; print('ready'); time.sleep(600)")
    with forks.running("run", f"--run-dir={tmp_path}/runs", script) as first:
        first.wait_for("ready")
        codes, output = forks.run("run", f"--run-dir={tmp_path}/runs", script)
        assert codes == [2], output
        assert "is owned by a live attempt" in output
        first.processes[0].signal("SIGTERM")
        assert first.wait() == [143]


def test_script_ends_with_the_process_that_started_it(forks: Forks, tmp_path: Path) -> None:
    script = write(tmp_path, "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)")
    with ended(start(sys.executable, MAIN, "run", f"--run-dir={tmp_path}/runs", script)) as job:
        assert job.processes[0].stdout is not None
        for line in job.processes[0].stdout:
            if found := re.search(r"^pid (\d+)", line):
                break
        job.processes[0].send_signal(signal.SIGKILL)
        job.processes[0].wait(60)
    from tests.rigs.fake_launch import lives

    for _ in range(200):
        if not lives(int(found[1])):  # type: ignore[index]
            break
        signal.sigtimedwait([], 0.05)
    else:
        raise AssertionError("the script outlived its rank")


