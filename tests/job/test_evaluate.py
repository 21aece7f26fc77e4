"""`job.evaluate` counts each sample once, whichever rank gets it, and leaves modes and gradients as they were."""

import re
from pathlib import Path

import pytest

from tests.job.test_log import evaluations
from tests.job.test_loop import ran, said
from tests.rigs.fork_server import Forks

LOOP = """
import os, signal, torch, rankup
from torch import nn

job = rankup.init("run", tensorboard=False)
model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
model[1].eval()  # frozen statistics
net = nn.parallel.DistributedDataParallel(model)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
job.track(model=net, sgd=sgd)
data = torch.arange(14.0).reshape(14, 1) / 14
validation = torch.utils.data.DataLoader(data[:10], batch_size=int(os.environ.get("SIZE", 4)))

def score(x):
    assert not torch.is_grad_enabled()
    assert not any(module.training for module in net.modules())
    return {"right": ((x * 14 % 3 == 0).sum(), len(x)), "out": (net(x).sum(), len(x))}

for epoch in job.epochs(3):
    for x in job.batches(torch.utils.data.DataLoader(data, batch_size=6, shuffle=True)):
        loss = net(x).square().mean() * job.weight
        sgd.zero_grad()
        loss.backward()
        with job.step(loss=loss):
            sgd.step()
        if job.step_number == 5 and job.rank == int(os.environ.get("DIE", -1)) and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    result = job.evaluate(validation, score)
    assert [module.training for module in model] == [True, False, True, True] and net.training and model.training
if job.is_main:
    print("digest", result["right"], result["out"], model[0].weight.flatten().tolist())
job.finish()
"""


@pytest.mark.parametrize("size", [2, 10])  # some ranks get two batches and one gets one, or two ranks get none
def test_each_sample_counts_once_after_a_lost_rank_too(size: int, forks: Forks, tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = ran(forks, tmp_path / "whole", LOOP, ranks=3, SIZE=str(size))
    (tmp_path / "killed" / "script.py").write_text(LOOP)
    killed = forks.ends("launch", "--nproc=3", "script.py", cwds=[tmp_path / "killed"],
                        env={"DIE": "2", "SIZE": str(size)})
    assert "no finished step was lost" in killed
    assert said(killed) == said(whole)
    assert said(whole).startswith("0.4 ")
    assert evaluations(tmp_path / "whole") == evaluations(tmp_path / "killed")
    assert [line["eval/right"] for line in evaluations(tmp_path / "whole")] == [0.4] * 3


@pytest.mark.parametrize(("change", "why"), [
    (("((x * 14 % 3 == 0).sum(), len(x))", "(x * 14 % 3 == 0).sum()"),
     "evaluate: right must be a pair (sum over the batch, its size), got tensor("),
    (("((x * 14 % 3 == 0).sum(), len(x))", "x * 14 % 3 == 0"),
     "evaluate: right must be a pair (sum over the batch, its size), got tensor(["),
    (("job.evaluate(validation, score)", "job.evaluate(validation, lambda x: (1, len(x)))"),
     "evaluate: the function must return a dict of pairs (sum, count) by name, got tuple"),
    (("job.evaluate(validation, score)", "job.evaluate(validation, lambda x: {'prefix': (1, len(x))})"),
     "evaluate: a name must be a text other than prefix, got 'prefix'"),
    (("job.evaluate(validation, score)", "job.evaluate(validation, lambda x: {0: (1, len(x))})"),
     "evaluate: a name must be a text other than prefix, got 0"),
    (("job.evaluate(validation, score)", "job.evaluate(validation, score) if job.is_main else {}"),
     "evaluate: job.evaluate must be called on all ranks"),
])
def test_what_can_not_be_counted_once_is_refused(
    change: tuple[str, str], why: str, forks: Forks, tmp_path: Path
) -> None:
    script = LOOP.replace(*change)
    assert script != LOOP
    output = ran(forks, tmp_path, script, ranks=2, code=2)
    assert re.search(re.escape(why), output), output
