"""What changes during training and is in no copy: one line says that a resume can't restore it."""

from pathlib import Path

import pytest

from tests.job.test_loop import ran
from tests.rigs.fork_server import Forks

LOOP = """
import os, random, signal, numpy, torch, rankup
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 4), nn.Linear(4, 1), nn.Dropout(0.0)
        self.first, self.second = KINDS
        self.level, self.calls = torch.zeros(()), 0
        self.register_buffer("mean", torch.zeros(()), persistent=False)
        self.register_buffer("mask", torch.ones(4), persistent=False)
        self.register_buffer("kept", torch.zeros(()))
        for kind in (torch.eye(2).to_sparse(), torch.tensor([float("nan")]), torch.empty(0), torch.tensor(True),
                     torch.eye(2, device="meta"), torch.eye(2).to(torch.float8_e5m2).t(), (torch.ones(2) + 1j).conj()):
            self.register_buffer(f"other{len(self._buffers)}", kind, persistent=False)
    def forward(self, x):
        FORWARD
        return self.b(self.drop(self.a(x * self.mask)))

job, main, never = rankup.init("run", tensorboard=False), random.Random(0), random.Random(1)
model = Net()
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
job.track(model=model, sgd=sgd)
for epoch in job.epochs(4):
    EPOCH
    for x in job.batches(torch.utils.data.DataLoader(torch.arange(32.0).reshape(8, 4) / 40, batch_size=2)):
        LOOPS
        loss = model(x).square().mean()
        sgd.zero_grad()
        loss.backward()
        with job.step():
            sgd.step()
        if job.step_number == int(os.environ.get("STOP", -1)):
            os.kill(os.getpid(), signal.SIGTERM)
            while not job.group.stop.requested:
                pass
    model.eval()  # an evaluation
    model.train()
    AFTER
job.finish()
"""


def script(**parts: str) -> str:
    text = LOOP.replace("KINDS", "torch.Generator(), numpy.random.default_rng(0)")
    for name in ("FORWARD", "EPOCH", "LOOPS", "AFTER"):
        text = text.replace(name, parts.get(name.lower(), "pass"))
    return text


@pytest.mark.parametrize(("parts", "named"), [
    ({"forward": "x = x + torch.rand((), generator=self.first)"}, ["generator model.first"]),
    ({"forward": "x = x + self.second.random()"}, ["generator model.second"]),
    ({"loops": "x = x + main.random()"}, ["generator main"]),
    ({"forward": "self.mean = 0.9 * self.mean + 0.1 * x.mean()"}, ["buffer model.mean"]),
    ({"forward": "self.mean.add_(1), self.kept.add_(1)", "loops": "main.random()"},
     ["generator main", "buffer model.mean"]),
    ({"forward": "self.level = 0.9 * self.level + x.mean(); self.calls += 1"},
     ["attribute model.level", "attribute model.calls"]),
    ({"forward": "self.shown = x * 2; self.calls = float(x.sum()); self.aux = self.a(x).mean()"}, []),
    ({"loops": "main = random.Random(job.step_number); x = x + main.random() + torch.rand(())"}, []),
    ({}, []),
])
def test_state_that_no_copy_holds_is_said_once(
    parts: dict[str, str], named: list[str], forks: Forks, tmp_path: Path
) -> None:
    output = ran(forks, tmp_path, script(**parts))
    assert output.count("changes in each step, and no checkpoint holds it") == len(named)
    assert all(f"track: the {each} changes in each step" in output for each in named)


FUNCTIONS = """
import gc, os, random, signal, torch, weakref, rankup
from torch import nn

class Own:  # an average of a script's own, without a state_dict
    def __init__(self, model):
        self.model, self.shadow = model, {key: each.clone() for key, each in model.state_dict().items()}
    def update(self):
        for key, each in self.model.state_dict().items():
            self.shadow[key] = 0.9 * self.shadow[key] + 0.1 * each

class Raises:
    def __getattr__(self, name):
        raise RuntimeError(name)

class Meter:
    def __init__(self):
        self.sum = self.last = 0
    def update(self, value):
        self.sum, self.last = self.sum + value, torch.ones(3)

class Trainer:
    def __init__(self, job):
        self.job, self.model = job, nn.Linear(4, 1)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.sgd, 30)
        self.ema, self.own = torch.optim.swa_utils.AveragedModel(self.model), Own(self.model)
        self.rng, self.meter, self.odd, self.steps = random.Random(0), Meter(), Raises(), <start>
        self.state = {"best": 9.0}
        job.track(model=self.model, sgd=self.sgd, state=self.state, **<tracked>)
    def run(self, loader):
        for epoch in self.job.epochs(4):
            self.one_epoch(loader)
            <epoch>
    def one_epoch(self, loader):
        total, kept = 0.0, []
        for i, x in enumerate(self.job.batches(loader)):
            loss = self.model(x).square().mean()
            self.sgd.zero_grad()
            loss.backward()
            with self.job.step():
                self.sgd.step()
                <step>
            kept.append(weakref.ref(loss))
            del loss, x
            gc.collect()
            assert kept[-1]() is None, "a look keeps the graph"
            if self.job.step_number == int(os.environ.get("STOP", -1)):
                os.kill(os.getpid(), signal.SIGTERM)
                while not self.job.group.stop.requested:
                    pass

def main():
    job = rankup.init("run", tensorboard=False)
    Trainer(job).run(torch.utils.data.DataLoader(torch.arange(32.0).reshape(8, 4) / 40, batch_size=2))
    job.finish()

main()
"""


def functions(step: str = "pass", *, start: str = "0", tracked: str = "{}", epoch: str = "pass") -> str:
    text = FUNCTIONS
    for name, part in {"<start>": start, "<tracked>": tracked, "<epoch>": epoch, "<step>": step}.items():
        text = text.replace(name, part)
    return text


@pytest.mark.parametrize(("parts", "named"), [
    ({"step": "self.ema.update_parameters(self.model), self.own.update(), self.rng.random()"},
     ["self.ema changes in each step", "self.own changes in each step", "the generator self.rng changes in each step"]),
    ({"step": "self.schedule.step()"}, ["self.schedule changes in each step"]),
    ({"epoch": "self.schedule.step()"}, ["self.schedule changes in each epoch"]),
    ({"step": "self.ema.update_parameters(self.model), self.meter.update(1)", "tracked": "dict(ema=self.ema)"}, []),
])
def test_changes_in_variables_of_functions_and_attributes_of_self_are_said(
    parts: dict[str, str], named: list[str], forks: Forks, tmp_path: Path
) -> None:
    output = ran(forks, tmp_path, functions(**parts))
    assert output.count(", and no checkpoint holds it") == len(named)
    assert all(f"track: {each}" in output for each in named)


@pytest.mark.parametrize(("parts", "stop", "named"), [
    ({"step": "total += i; self.steps += 1"}, "6", "self.steps, total and i begin anew"),
    ({"step": "total += i; self.steps += 1"}, "4", "self.steps begins anew"),  # at the end of an epoch
    ({"epoch": "self.last = self.last + 1 if epoch else 1"}, "2", ""),  # no pass of this loop has ended
    ({"step": "self.steps += 1; self.state['best'] = 0.5", "start": "job.step_number"}, "6", ""),
])
def test_variables_that_begin_anew_are_said_in_the_resume(
    parts: dict[str, str], stop: str, named: str, forks: Forks, tmp_path: Path
) -> None:
    assert "anew in this" not in ran(forks, tmp_path, functions(**parts), code=143, STOP=stop)
    output = ran(forks, tmp_path, functions(**parts))
    assert output.count("anew in this resume") == bool(named)
    assert named in output


@pytest.mark.parametrize(("epoch", "said"), [
    ("if epoch == 0: model.a.requires_grad_(False)", "model has 4 parameters with requires_grad and had 2 in the"),
    ("if epoch == 1: model.drop.eval(); model.a.eval()", ""),  # the evaluation at the end of this epoch sets them back
    ("if epoch == 1: model.train = lambda on=True: model; model.drop.training = False",
     "model has 4 modules in training mode and had 3 in the checkpoint"),
    ("model.a.requires_grad_(epoch == 0)", ""),
])
def test_resume_that_trains_other_parameters_or_modules_says_so(
    epoch: str, said: str, forks: Forks, tmp_path: Path
) -> None:
    output = ran(forks, tmp_path, script(epoch=epoch), code=143, STOP="10")
    assert "in the checkpoint" not in output
    output = ran(forks, tmp_path, script(epoch=epoch))
    assert ("track: model has" in output) == bool(said)
    assert said in output


@pytest.mark.parametrize(("inner", "said"), [
    ("for x in loader:", 1), ("for x in [1.0]:", 1), ("for x in job.batches(loader):", 0),
    ("for x in job.steps(9):", 0),
])
def test_epoch_whose_batches_a_resume_cannot_find_is_said(inner: str, said: int, forks: Forks, tmp_path: Path) -> None:
    output = ran(forks, tmp_path, f"""
import rankup
job, count, loader = rankup.init("run", tensorboard=False), {{"n": 0}}, [1.0, 2.0]
job.track(count=count)
for epoch in job.epochs(3):
    {inner}
        with job.step():
            count["n"] += 1
job.finish()
""")
    assert output.count("epochs: a step took no batch from job.batches. A resume does not know how far") == said
