"""`job.keep` gives a copy a name, and `job.end` ends the run for good. Both survive kills and later starts."""

import re
from pathlib import Path

import pytest
import torch

from rankup import cli
from tests.job.test_loop import ran, said
from tests.observe.test_status import as_json
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import result
from tests.rigs.object_store import BUCKET, S3

LOOP = """
import os, signal, sys, torch, rankup
from torch.nn.parallel import DistributedDataParallel

job, best = rankup.init(os.environ.get("RUN", "run"), tensorboard=False, keep=1), {"accuracy": 0.0, "waits": 0}
model = DistributedDataParallel(torch.nn.Linear(4, 1))
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
job.track(model=model, sgd=sgd, best=best)
for epoch in job.epochs(9):
    for x in job.batches(torch.utils.data.DataLoader(torch.arange(40.0).reshape(10, 4) / 40, batch_size=2)):
        loss = model(x).square().mean()
        sgd.zero_grad()
        loss.backward()
        with job.step():
            sgd.step()
        if os.environ.get("DIE") == f"{job.rank}:{job.step_number}" and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    accuracy = job.log(accuracy=(0.5 + [0, 0.4, 0.1, 0.2, 0.1, 0.1, 0.1][epoch], 1))["accuracy"]
    better = accuracy > best["accuracy"]
    if better:
        job.keep("best")
    with job.change():
        best.update(accuracy=max(accuracy, best["accuracy"]), waits=0 if better else best["waits"] + 1)
    if best["waits"] >= 3:
        job.end("early stop")
    if os.environ.get("DIE") == f"{job.rank}:end" and job.position.ended and not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
print(f"behind-{job.rank}\\n", end="")
if job.rank == 0:
    print("digest", model.module.weight.tolist(), best)
job.finish()
"""
LINE = ("launch", "--nproc=3", "script.py")


@pytest.mark.parametrize("die", ["", "1:13", "0:23", "2:end"])
def test_kept_copy_stays_and_the_end_is_the_same_after_a_kill(die: str, forks: Forks, tmp_path: Path) -> None:
    """The best state is that after the second of five epochs, and the run ends for good after the fifth."""
    (tmp_path / "script.py").write_text(LOOP)
    output = forks.ends(*LINE, cwds=[tmp_path], env={"DIE": die})
    assert ("no finished step was lost" in output) == bool(die)
    assert output.count("behind-0") == 1
    assert "finished, job.end ended the run after 25 steps (early stop): " in output
    assert said(output).endswith(str({"accuracy": 0.9, "waits": 3}))
    copies = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert copies == ["step-00000010", "step-00000025"]
    assert result(tmp_path / "run")["ended"] == "early stop"
    again = forks.ends(*LINE, cwds=[tmp_path])
    assert again.count("no step was left to train, job.end ended the run after 25 steps (early stop): ") == 1
    assert "behind" not in again
    assert as_json("--run-dir", tmp_path, "run")["state"] == "finished"
    best, newest = tmp_path / "best.pt", tmp_path / "newest.pt"
    assert cli.main(["export", "run", str(best), "--run-dir", str(tmp_path), "--checkpoint", "best"]) == 0
    assert cli.main(["export", "run", str(newest), "--run-dir", str(tmp_path)]) == 0
    assert cli.main(["export", "run", str(newest), "--run-dir", str(tmp_path), "--checkpoint", "worst"]) == 2
    states = [torch.load(path, weights_only=True) for path in (best, newest)]
    assert str(states[1]["model"]["weight"].tolist()) in said(output)
    assert not torch.equal(states[0]["model"]["weight"], states[1]["model"]["weight"])


def test_copy_that_is_kept_in_a_store_is_there_on_another_machine(s3: S3, forks: Forks, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}/mine"
    text = LOOP.replace('job.end("early stop")', "signal.raise_signal(signal.SIGTERM)")
    with s3.door() as door:
        ran(forks, tmp_path, text, ranks=2, code=143, **door.env, RUN=url, RANKUP_CACHE=str(tmp_path / "one"))
        ran(forks, tmp_path, LOOP, ranks=2, **door.env, RUN=url, RANKUP_CACHE=str(tmp_path / "two"))
        forks.ends("export", url, tmp_path / "best.pt", "--checkpoint", "best", cwds=[tmp_path], env=door.env)
    best = torch.load(tmp_path / "best.pt", weights_only=True)["best"]
    assert best in ({"accuracy": 0.5, "waits": 0}, {"accuracy": 0.9, "waits": 0})  # before or after its job.change


@pytest.mark.parametrize(("loop", "steps"), [
    ("for step in job.steps(50):\n    STEP", 7), ("for x in job.batches([1] * 50):\n    STEP", 7),
    ("for epoch in job.epochs(3):\n    for x in job.batches([1] * 5):\n        STEP", 7),
])
def test_end_leaves_each_kind_of_loop_after_the_same_step(loop: str, steps: int, forks: Forks, tmp_path: Path) -> None:
    step = "\n".join([
        "with job.step():", "    count['n'] += 1", "if job.step_number == 7:", "    job.end('enough')"
    ])
    indent = re.search(r"\n( *)STEP", loop)
    assert indent
    text = (
        "import rankup\njob, count = rankup.init('run'), {'n': 0}\njob.track(count=count)\n"
        + loop.replace("STEP", step.replace("\n", f"\n{indent[1]}"))
        + "\nprint(f'behind {job.rank} {count}\\n', end='')\njob.finish()\n"
    )
    output = ran(forks, tmp_path, text, ranks=2)
    assert sorted(re.findall(r"behind (\d) \{'n': (\d+)\}", output)) == [("0", str(steps)), ("1", str(steps))]


STOPS_EARLY = """
import os, signal, torch, rankup
from torch.nn.parallel import DistributedDataParallel

job = rankup.init("run", tensorboard=False, log_every_steps=1)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
job.track(model=model, sgd=sgd)

def die(where):
    if f"{job.rank}:{job.step_number}:{where}" == os.environ.get("DIE") and not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

def look():
    die("look")
    if job.step_number in (4, 6):
        over = job.log(loss=job.step_number)["loss"] == 6
        if over:
            job.end("early stop")
        return over

data = torch.utils.data.DataLoader(torch.arange(40.0).reshape(10, 4) / 40, batch_size=2)
LOOP
    if "ABOVE" in os.environ and look():
        break
    x = next(batches) if "batches" in globals() else x
    loss = model(x).square().mean()
    sgd.zero_grad()
    loss.backward()
    with job.step():
        sgd.step()
    if "ABOVE" not in os.environ:
        look()
if job.is_main:
    print("digest", model.module.weight.tolist())
job.finish()
"""
LOOPS = [
    "for x in job.batches([torch.full((2, 4), n / 9) for n in range(9)]):",
    "batches = job.cycle(data)\nfor _ in job.steps(9):",
]


@pytest.mark.parametrize("loop", LOOPS)
def test_end_above_the_step_is_exact_and_one_behind_it_is_said(loop: str, forks: Forks, tmp_path: Path) -> None:
    """If a rank is killed between its step and the code behind it, a resume begins with the next batch."""
    warning = "job.log comes after job.step in the body of the loop"
    digests = []
    for name, env in (
        ("above", {"ABOVE": "1"}), ("killed", {"ABOVE": "1", "DIE": "1:6:look"}),
        ("behind", {}), ("lost", {"DIE": "1:6:look"}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "script.py").write_text(STOPS_EARLY.replace("LOOP", loop))
        output = forks.ends("launch", "--nproc=2", "script.py", cwds=[tmp_path / name], env=env)
        assert ("no finished step was lost" in output) == ("DIE" in env)
        assert output.count(warning) == (0 if "ABOVE" in env else 1), output
        digests.append(said(output))
    assert digests[0] == digests[1] == digests[2] != digests[3]
    assert result(tmp_path / "killed" / "run")["step"] == 6


@pytest.mark.parametrize("call", ["save()", "keep('best')", "gather(1)", "finish()"])
def test_call_of_one_rank_alone_is_refused(call: str, forks: Forks, tmp_path: Path) -> None:
    text = (
        "import rankup\njob, count = rankup.init('run'), {'n': 0}\njob.track(count=count)\nfor _ in job.epochs(2):\n"
        "    for x in job.batches([1] * 4):\n        with job.step():\n            count['n'] += 1\n"
        f"    if job.rank == 1 and job.epoch:\n        job.{call}\njob.finish()\n"
    )
    output = ran(forks, tmp_path, text, ranks=2, code=2)
    name = call.partition("(")[0]
    assert f"error: {name}: job.{name} must be called on all ranks, got a call on rank 1" in output


@pytest.mark.parametrize(("call", "why"), [
    ("job.keep(None)", "keep: it needs a word as name, and tracked objects, got None"),
    ("job.keep(f'rank{job.rank}')", "keep: the step and the argument must be the same on all ranks"),
    ("job.start_from(3, torch.nn.Linear(1, 1))", "start_from: it must have a path or address and then a module, got"),
    ("job.keep('step-1')", "keep: it needs a word as name, and tracked objects, got 'step-1'"),
    ("job.end(f'rank {job.rank}')", "end: the step and the argument must be the same on all ranks"),
    ("job.end('x')\nwith job.step():\n    pass", "step: it must come before job.end"),
    ("if job.is_main:\n    job.end('x')", "end: job.end must be called on all ranks, got a call on rank 0"),
])
def test_keep_and_end_that_cannot_work_are_refused(call: str, why: str, forks: Forks, tmp_path: Path) -> None:
    text = "import rankup, torch\njob, count = rankup.init('run'), {'n': 0}\n"
    text += "" if "start_from" in call else "job.track(count=count)\n"
    text += f"{call}\njob.finish()\n"
    assert why in ran(forks, tmp_path, text, ranks=2, code=2)
