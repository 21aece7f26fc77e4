"""A notebook: errors and Ctrl-C end the run and not the process, and another run may follow.

Python's own prompt takes the place of a notebook's kernel, which calls `post_run_cell` instead of `sys.excepthook`.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.job.test_loop import ran
from tests.observe.test_status import as_json
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT, environment, wait_for

LOOP = """
import time, torch, rankup
job = rankup.init("run", tensorboard=False, save_every_steps=5, settings={"why": 1}, step_timeout_s=1, again=AGAIN)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
job.track(model=model, sgd=sgd)
print("built", job.finished)
BEFORE
for step in job.steps(20):
    loss = model(torch.randn(2, 4)).square().mean()
    sgd.zero_grad()
    loss.backward()
    with job.step():
        sgd.step()
    if step == AT:
        print("at", step)
        HERE
job.finish()
print("weights", model.weight.tolist())
"""


class Prompt:
    """Python's prompt, to which a test types cells."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.output, self._cells = folder, "", 0
        self.process = subprocess.Popen(
            [sys.executable, "-i", "-q"], cwd=folder, env=environment({"PYTHONPATH": str(ROOT)}), text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self.process.stdin is not None
        self.process.stdin.write("from pathlib import Path\n")

    def _read(self) -> None:
        assert self.process.stdout is not None
        while text := os.read(self.process.stdout.fileno(), 4096):
            self.output += text.decode()

    def type(self, text: str, *, until: str = "") -> str:
        """Run `text` as a cell, and return what is printed until a line `until`, by default until its end."""
        assert self.process.stdin is not None
        self._cells += 1
        (self.folder / f"cell{self._cells}.py").write_text(text)
        begin = len(self.output)
        self.process.stdin.write(
            f"exec(Path('cell{self._cells}.py').read_text())\nprint('cell', 'over {self._cells}')\n"
        )
        self.wait(until or f"cell over {self._cells}\n", begin)
        return self.output[begin:]

    def wait(self, text: str, begin: int = 0) -> None:
        wait_for(text, lambda: text in self.output[begin:], timeout_s=240, log=lambda: self.output,
                 over=lambda: self.process.poll() is not None)

    def interrupt(self) -> str:
        """Press Ctrl-C, and return what is printed until the end of the cell."""
        begin = len(self.output)
        os.kill(self.process.pid, signal.SIGINT)
        self.wait(f"cell over {self._cells}\n", begin)
        return self.output[begin:]


def loop(*, at: int = -1, here: str = "pass", before: str = "", again: bool = False) -> str:
    text = LOOP.replace("AT", str(at)).replace("HERE", here).replace("BEFORE", before)
    return text.replace("AGAIN".replace("AT", str(at)), str(again))


@pytest.fixture
def prompt(tmp_path: Path) -> Iterator[Prompt]:
    found = Prompt(tmp_path)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait()
        found._reader.join()
        for pipe in (found.process.stdin, found.process.stdout):
            pipe.close()


def state(prompt: Prompt) -> tuple[str, int]:
    found = as_json("--run-dir", prompt.folder, "run")
    return found["state"], found["step"]


def weights(output: str) -> str:
    return next(line for line in output.splitlines() if line.startswith("weights"))


def test_errors_and_interrupts_end_the_run_and_not_the_process(prompt: Prompt) -> None:
    (prompt.folder / "whole").mkdir()
    whole = prompt.type(f"import os; os.chdir('whole')\n{loop()}\nos.chdir('..')")
    assert "finished after 20 steps" in whole
    # Ctrl-C before the first step, which ends a script at once
    prompt.type(loop(before="print('sleeps'); time.sleep(600)"), until="sleeps\n")
    assert "SIGINT: nothing to save at step 0. The same command" in prompt.interrupt()
    assert state(prompt)[0] == "stopped"
    # An error in the loop, and the traceback as usual
    output = prompt.type(loop(at=7, here="raise ValueError('a mistake')"))
    assert "built False" in output
    assert "ValueError: a mistake" in output
    assert state(prompt)[0] == "failed"
    # Ctrl-C in the loop saves, also if no deadline of a step counts while the person thinks
    output = prompt.type(loop(at=11, here="time.sleep(600)"), until="at 11\n")
    assert "resumed from step-00000005" in output
    assert "SIGINT: saved at step 12" in prompt.interrupt()
    assert state(prompt) == ("stopped", 12)
    # The cell is run again while its job is open, and a mistake of the user is one line
    prompt.type(loop(at=14, here="break").replace("job.finish()", ""))
    output = prompt.type(loop(again=False))
    assert "SIGINT: saved at step 15" in output
    assert "is not tracked" not in output  # an earlier job looks at no optimizer
    assert weights(output) == weights(whole)
    assert state(prompt) == ("finished", 20)
    # A finished run ends the cell in one line
    output = prompt.type(loop())
    assert "no step was left to train, all 20 are done" in output
    assert "Traceback" not in output
    assert "weights" not in output
    assert state(prompt) == ("finished", 20)
    assert "weights" in prompt.type(loop(again=True))


def test_with_ends_the_run_at_the_end_of_its_block(prompt: Prompt) -> None:
    def block(body: str, end: str = "") -> str:
        return (
            "import rankup, time\nwith rankup.init('run', tensorboard=False) as job:\n    count = {'n': 0}\n"
            "    job.track(count=count)\n    for step in job.steps(4):\n        with job.step():\n"
            f"            count['n'] += 1\n        {body}\n{end}"
        )

    output = prompt.type(block("assert step < 2"))
    assert "AssertionError" in output
    assert state(prompt)[0] == "failed"
    assert "finished after 4 steps" in prompt.type(block("pass"))
    assert state(prompt) == ("finished", 4)
    # The person leaves while a job is open
    prompt.type("import shutil; shutil.rmtree('run')")
    left = block("if step == 2: break").replace("with rankup", "job = OPEN\nif job: #")
    prompt.type(left.replace("OPEN", "rankup.init('run', tensorboard=False)").replace("job.steps(4)", "job.steps(9)"))
    assert prompt.process.stdin is not None
    prompt.process.stdin.write("exit()\n")
    assert prompt.process.wait(240) == 0
    assert state(prompt) == ("stopped", 3)


SPAWNED = """
def train(slow=False, mistake=False):
    import time, torch, rankup
    from torch.nn.parallel import DistributedDataParallel
    job = rankup.init("run", tensorboard=False)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    job.track(model=model, sgd=sgd)
    for step in job.steps(10):
        loss = model(torch.randn(2, 4)).square().mean()
        sgd.zero_grad()
        loss.backward()
        if mistake and job.rank:
            raise ValueError("a mistake")
        with job.step():
            sgd.step()
        if slow and step > 2:
            print("at", step)
            time.sleep(0.1 if job.group.stop.requested else 1.0)
    if job.is_main:
        print("weights", model.module.weight.tolist())
"""


def test_spawn_runs_a_function_on_two_ranks_that_stop_resume_and_fail(
    prompt: Prompt, forks: Forks, tmp_path: Path
) -> None:
    (tmp_path / "whole").mkdir()
    whole = weights(ran(forks, tmp_path / "whole", f"{SPAWNED}\ntrain()\n", ranks=2))
    prompt.type(f"{SPAWNED}\nimport rankup, torch\nx = torch.randn(300, 300) @ torch.randn(300, 300)")
    assert "ValueError: a mistake" in prompt.type("rankup.spawn(train, False, True)")
    assert state(prompt)[0] == "failed"
    prompt.type("rankup.spawn(train, True)", until="at 3\n")
    assert "spawn: the ranks ended with the exit codes {0: 143, 1: 143}" in prompt.interrupt()
    assert state(prompt)[0] == "stopped"
    assert weights(prompt.type("rankup.spawn(train)")) == whole
    assert state(prompt) == ("finished", 10)
