"""The end of a process: at once and with its code, whatever hangs, and through one module."""

import ast
import signal
import subprocess
import sys

import pytest

from tests.rigs.jobs import ROOT, environment

STUCK = "import sys, threading, time; from rankup.agent import processes as exit; hang = lambda: time.sleep(600)\n"


def run(code: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", STUCK + code]
    env = environment({"PYTHONUNBUFFERED": ""})
    return subprocess.run(line, capture_output=True, text=True, timeout=120, env=env, cwd=ROOT, check=False)


def test_finish_writes_what_was_printed_and_waits_for_no_thread() -> None:
    done = run("threading.Thread(target=hang).start(); sys.stdout.write('all of it'); exit.finish(3)")
    assert (done.returncode, done.stdout) == (3, "all of it")


def test_what_was_printed_around_the_guard_is_written_in_its_order() -> None:
    prints = "sys.stdout.write('a'); guard('stdout'); sys.stdout.write('b'); sys.stdout.flush()"
    done = run(f"from rankup.agent.logs import guard; {prints}; sys.__stdout__.write('c'); exit.finish(0)")
    assert done.stdout == "abc"


def test_leave_does_not_wait_for_a_last_word_that_hangs() -> None:
    assert run("exit.leave(171, hang, timeout_s=0.2)").returncode == 171


def test_leave_takes_the_code_that_the_last_word_returns() -> None:
    done = run("exit.leave(171, lambda: sys.stdout.write('said') and 30, timeout_s=60)")
    assert (done.returncode, done.stdout) == (30, "said")


@pytest.mark.parametrize("word", ["lambda: 1 / 0", "lambda: None"])
def test_leave_keeps_its_code_where_the_last_word_has_none(word: str) -> None:
    assert run(f"exit.leave(143, {word}, timeout_s=60)").returncode == 143


def test_leave_ends_any_thread_s_process() -> None:
    assert run("threading.Thread(target=exit.leave, args=(170,)).start(); hang()").returncode == 170


def test_within_returns_what_was_found_in_time_and_none_otherwise() -> None:
    done = run("print(exit.within(60, lambda: 7), exit.within(0.1, hang)); exit.finish(0)")
    assert done.stdout == "7 None\n"


def test_hard_deadline_ends_a_process_and_says_where_it_was() -> None:
    done = run("exit.set_hard_deadline(0.5); hang()")
    assert done.returncode == -signal.SIGALRM
    assert "in <lambda>" in done.stderr


def test_hard_deadline_that_is_cleared_ends_nothing() -> None:
    code = "exit.set_hard_deadline(0.2); exit.clear_hard_deadline(); time.sleep(0.6); exit.finish(5)"
    assert run(code).returncode == 5


def test_one_module_ends_processes_and_the_agent_its_children() -> None:
    files = [path for name in ("rankup", "train") for path in (ROOT / name).rglob("*.py")]
    assert len(files) > 30
    endings = {
        str(path.relative_to(ROOT))
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os._exit", "os.abort", "signal.setitimer")
    }
    # The sender of a tracker is a process of its own
    assert endings == {"rankup/agent/fork_server.py", "rankup/agent/processes.py", "rankup/observe/tracker.py"}
