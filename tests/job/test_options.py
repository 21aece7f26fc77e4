"""Options of optimizers that code changes outside of `job.step`. A resume changes none of them a second time."""

from pathlib import Path

import pytest

from tests.job.test_loop import ran, said
from tests.rigs.fork_server import Forks

LOOP = """
import os, signal, torch, rankup

job, model = rankup.init("run", tensorboard=False), torch.nn.Linear(4, 1)
sgd = torch.optim.SGD(model.parameters(), lr={lr}, momentum=0.5)
job.track(model=model, sgd=sgd)
def scale(factor):
    for group in sgd.param_groups:
        group["lr"] = group["lr"] * factor
{after_track}
loader = torch.utils.data.DataLoader(torch.arange(32.0).reshape(8, 4) / 40, batch_size=2)
for epoch in job.epochs(3):
    {epoch_start}
    for x in job.batches(loader):
        {before}
        loss = model(x).square().mean()
        sgd.zero_grad()
        loss.backward()
        with job.step():
            sgd.step()
            {in_step}
        {after}
        if job.step_number == int(os.environ.get("STOP", -1)):
            os.kill(os.getpid(), signal.SIGTERM)
            while not job.group.stop.requested:
                pass
print("digest", model.weight.tolist(), sgd.param_groups[0]["lr"])
job.finish()
"""
PARTS = ("after_track", "epoch_start", "before", "in_step", "after")
LATE = "late = torch.optim.lr_scheduler.LinearLR(sgd, 0.5, total_iters=20); job.track(late=late)"


def script(lr: str = "0.1", **parts: str) -> str:
    return LOOP.format(lr=lr, **{name: parts.get(name, "pass") for name in PARTS})


@pytest.mark.parametrize(("stop", "undone", "text"), [
    (6, True, script(epoch_start="scale(0.5)")),
    (10, False, script(epoch_start="scale(0.5 if epoch == 1 else 1)")),
    (6, True, script(epoch_start="scale(0.5 if epoch == 1 else 1)", lr="torch.tensor(0.1)")),
    (8, True, script(after_track="scale(0.5)")),  # the epoch that follows has not begun
    (6, True, script(after_track=LATE, in_step="late.step()")),
    (6, False, script(epoch_start="sgd.param_groups[0]['lr'] = 0.1 / (1 + epoch)")),
    (6, False, script(before="sgd.param_groups[0]['lr'] = 0.1 / (1 + job.step_number)")),
], ids=["each-epoch", "one-epoch", "tensor", "before-the-loop", "scheduler", "by-epoch", "by-step"])
def test_option_changed_by_code_that_runs_again_changes_once(
    stop: int, undone: bool, text: str, forks: Forks, tmp_path: Path
) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = ran(forks, tmp_path / "whole", text)
    stopped = ran(forks, tmp_path / "parts", text, code=143, STOP=str(stop))
    parts = ran(forks, tmp_path / "parts", text)
    assert said(parts) == said(whole)
    assert ("by code that a resume runs again: undone" in parts) == undone
    assert not any(word in whole + stopped for word in ("runs again", "after the block"))


@pytest.mark.parametrize("loop", ["batches", "steps"])
def test_option_changed_after_the_step_is_said_once(loop: str, forks: Forks, tmp_path: Path) -> None:
    text = script(after="scale(0.9)")
    if loop == "steps":
        text = text.replace("for x in job.batches(loader):", "if epoch: break\n    for n in job.steps(9):")
        text = text.replace("model(x)", "model(torch.ones(4) / (n + 1))").replace("job.epochs(3)", "range(2)")
    output = ran(forks, tmp_path, text)
    assert output.count("after the block of job.step: a resume here would lose the change") == 1
    assert "track: sgd.lr: 0.1 -> 0.09" in output
