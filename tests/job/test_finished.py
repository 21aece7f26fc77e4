"""A run that has finished, and is started again by the same command, by another one, or by a launcher's restart."""

import re
from pathlib import Path

from tests.job.test_loop import said
from tests.observe.test_status import as_json
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import result

LOOP = """
import os, signal, sys, torch, rankup
from torch.nn.parallel import DistributedDataParallel

def die(where):
    if os.environ.get("DIE") == where and job.rank == 1 and not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

job = rankup.init("run", again="AGAIN" in os.environ, tensorboard=False)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
job.track(model=model, sgd=sgd)
for epoch in LOOP:
    for x in job.batches(torch.utils.data.DataLoader(torch.arange(40.0).reshape(10, 4) / 40, batch_size=2)):
        loss = model(x).square().mean()
        sgd.zero_grad()
        loss.backward()
        with job.step():
            sgd.step()
        die(str(job.step_number))
print(f"behind-{job.rank} {job.finished}\\n", end="")
if "READS" in os.environ:
    loss.item()
job.finish()
die("end")
if job.rank == 0:
    print("digest", model.module.weight.tolist())
"""
EPOCHS = 'job.epochs(int(os.environ.get("EPOCHS", 2)))'
LINE = ("launch", "--nproc=2", "script.py")
NOTHING = r"no step was left to train, all \d+ are done: \S+/run/; .* To train anew give another run or fresh=True"


def started(forks: Forks, folder: Path, code: int = 0, **env: str) -> str:
    return forks.ends(*LINE, cwds=[folder], env=env, code=code)


def test_finished_run_ends_with_one_line_where_its_loop_would_begin(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LOOP.replace("LOOP", EPOCHS))
    output = started(forks, tmp_path)
    assert re.findall(r"behind-\d (\w+)", output) == ["False", "False"]
    for _ in range(2):
        output = started(forks, tmp_path)
        assert len(re.findall(NOTHING, output)) == 1, output
        assert "behind" not in output
        assert as_json("--run-dir", tmp_path, "run")["state"] == "finished"
    # A mistake in code that runs again on request is not the end of the run
    assert "NameError" in started(forks, tmp_path, code=1, AGAIN="1", READS="1")
    assert as_json("--run-dir", tmp_path, "run")["state"] == "finished"
    output = started(forks, tmp_path, AGAIN="1")
    assert re.findall(r"behind-\d (\w+)", output) == ["True", "True"]
    assert (result(tmp_path / "run")["step"], as_json("--run-dir", tmp_path, "run")["state"]) == (10, "finished")


def test_finished_run_goes_on_with_more_epochs_to_the_same_bits(forks: Forks, tmp_path: Path) -> None:
    for name in ("whole", "more"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "script.py").write_text(LOOP.replace("LOOP", EPOCHS))
    whole = said(started(forks, tmp_path / "whole", EPOCHS="4"))
    started(forks, tmp_path / "more")
    output = started(forks, tmp_path / "more", EPOCHS="4", DIE="13")
    assert "no finished step was lost" in output
    assert said(output) == whole
    assert result(tmp_path / "more" / "run")["step"] == 20
    assert "behind" not in started(forks, tmp_path / "more", EPOCHS="4")


def test_restart_of_the_same_launch_repeats_the_code_behind_the_loop(forks: Forks, tmp_path: Path) -> None:
    """A rank was killed after `job.finish`, and the launcher restarts it: its last code has not run to its end."""
    (tmp_path / "script.py").write_text(LOOP.replace("LOOP", EPOCHS))
    output = started(forks, tmp_path, DIE="end")
    assert output.count("behind-1 False") == 2, output
    assert not re.search(NOTHING, output)


def test_call_after_the_end_of_the_job_is_one_line_with_code_2(forks: Forks, tmp_path: Path) -> None:
    """By then the group is gone, and another attempt may own the run. Functions of atexit still run."""
    (tmp_path / "script.py").write_text(
        "import atexit, rankup\njob, n = rankup.init('run', tensorboard=False), {'n': 0}\njob.track(n=n)\n"
        "for step in job.steps(2):\n    with job.step():\n        n['n'] += 1\n"
        "job.finish()\njob.finish()\nsaved = sorted((job.run_dir / 'checkpoints').iterdir())\n"
        "for call in (job.save, job.step().__enter__, lambda: job.log(a=1), lambda: job.keep('a'),\n"
        "             lambda: job.end('a'), lambda: job.gather(1), lambda: next(job.steps(9)),\n"
        "             lambda: next(job.epochs(9)), lambda: job.evaluate([1], lambda b: {'a': (1, 1)}),\n"
        "             lambda: job.cycle([1]), lambda: job.track(a=[]), lambda: job.recompute(len, 1),\n"
        "             job.change().__enter__):\n"
        "    try:\n        call()\n    except rankup.UserError as error:\n        print('refused')\n"
        "assert saved == sorted((job.run_dir / 'checkpoints').iterdir())\n"
        "atexit.register(print, 'at exit')\njob.log(a=1)\n"
    )
    output = forks.ends(*LINE, cwds=[tmp_path], code=2)
    assert output.count("refused") == 2 * 13, output
    assert output.count("at exit") == 2
    assert output.count("error: job: it must not have ended, got a call after job.finish") == 2
