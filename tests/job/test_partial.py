"""A run begins with given weights, saves only what trains, and takes in new objects, with the bits of an undisturbed
run."""

import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from tests.job.test_loop import ran, said
from tests.rigs.fork_server import Forks

SCRIPT = """
import copy, hashlib, os, sys, time
import torch, rankup
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tests.rigs.faulting_workload import stop_is_known

job = rankup.init('run', save_every_steps=4)
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
start, more = os.environ.get('START', 'w.pt'), {}
job.start_from(start, model)
if 'ONLY' in os.environ:
    model[0].requires_grad_(False)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
job.track(model=ddp, optimizer=optimizer, **{'only': 'trained'} if 'ONLY' in os.environ else {})
if 'EMA' in os.environ:
    more['ema'] = copy.deepcopy(model).requires_grad_(False)
    if os.environ['EMA'] == 'differs':
        more['ema'][3].bias.data.add_(job.rank)
    job.track(missing='error' if os.environ['EMA'] == 'missing' else 'keep', **more)
die = os.environ.get('DIE', '')
for step in job.steps(12):
    loss = ddp(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    with job.step(loss=loss):
        optimizer.step()
        for name in more:
            torch._foreach_lerp_([*more[name].parameters()], [*model.parameters()], 0.1)
        if 'MISTAKE' in os.environ:
            model[0].weight.data.add_(1)
    if die == f'{job.rank}:{job.step_number}' and not os.path.exists('died'):
        open('died', 'w').close()
        number = int(os.environ['SIGNAL'])
        os.kill(os.getpid(), number)
        while number == 15 and not stop_is_known(job.group.stop):
            time.sleep(0.001)
if job.is_main:
    states = repr([each.state_dict() for each in (model, *more.values())])
    print('digest', hashlib.sha256(states.encode()).hexdigest())
job.finish()
"""
STOP = {"DIE": "0:6", "SIGNAL": str(int(signal.SIGTERM))}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with weights of another program, which wrapped its model, and with a head of another size."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
    torch.save({"state_dict": {f"module.{name}": each for name, each in model.state_dict().items()}}, tmp_path / "w.pt")
    return tmp_path


def alone(forks: Forks, folder: Path, text: str = SCRIPT, **env: str) -> str:
    """Return the digest of an undisturbed run in a folder of its own."""
    (other := folder / "alone").mkdir()
    shutil.copy(folder / "w.pt", other)
    return said(ran(forks, other, text, ranks=2, **env))


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_parameters_that_do_not_train_are_in_no_checkpoint_and_each_start_reads_them(
    forks: Forks, folder: Path, how: str
) -> None:
    expected = alone(forks, folder, ONLY="1")
    if how == "kill":
        (folder / "script.py").write_text(SCRIPT)
        line = ("launch", "--nproc=2", folder / "script.py")
        output = forks.ends(*line, cwds=[folder], env={"ONLY": "1", "DIE": "1:6", "SIGNAL": "9"})
        assert "no finished step was lost" in output
    else:
        ran(forks, folder, SCRIPT, ranks=2, code=143, ONLY="1", **STOP)
        output = ran(forks, folder, SCRIPT, ranks=2, ONLY="1")
    assert said(output) == expected
    assert "3.weight keeps its initial value: its shape there is (3, 8), here (2, 8)" in output
    with safe_open(folder / "run/checkpoints/step-00000012/model.safetensors", framework="pt") as file:
        names = {*file.keys()}
    assert names == {"1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked",
                     "3.weight", "3.bias"}


def test_parameters_outside_of_checkpoints_that_differ_are_refused(forks: Forks, folder: Path) -> None:
    ran(forks, folder, SCRIPT, ranks=2, code=143, ONLY="1", **STOP)
    torch.save(nn.Sequential(nn.Linear(8, 8)).state_dict(), folder / "other.pt")
    output = ran(forks, folder, SCRIPT, ranks=2, code=2, ONLY="1", START="other.pt")
    assert output.count("does not fit this model: the parameters that are not trained were others") == 1
    assert 'only="trained" keeps other parameters' not in output
    assert "does not fit this model" in ran(forks, folder, SCRIPT, ranks=2, code=2)  # tracked whole
    output = ran(forks, folder, SCRIPT.replace("'run'", "'new'"), ranks=2, code=2, ONLY="1", MISTAKE="1")
    assert 'must stay as they are with only="trained"' in output


def test_new_object_begins_in_an_old_run_and_is_kept_from_then_on(forks: Forks, folder: Path) -> None:
    ran(forks, folder, SCRIPT, ranks=2, code=143, **STOP)
    shutil.copytree(folder / "run", folder / "alone" / "run")
    output = ran(forks, folder, SCRIPT, ranks=2, code=2, EMA="missing")
    assert 'track: ema must be in ' in output
    assert 'If it is new, give track missing="keep"' in output
    assert "track: ema must be the same on all ranks" in ran(forks, folder, SCRIPT, ranks=2, code=2, EMA="differs")
    expected = said(output := ran(forks, folder / "alone", SCRIPT, ranks=2, EMA="1"))
    assert "so it begins anew: ema" in output
    (folder / "died").unlink()
    ran(forks, folder, SCRIPT, ranks=2, code=143, EMA="1", DIE="1:9", SIGNAL="15")
    output = ran(forks, folder, SCRIPT, ranks=2, EMA="1")
    assert "so it begins anew" not in output
    assert said(output) == expected


def test_run_begins_with_the_weights_of_another_run_once(forks: Forks, folder: Path) -> None:
    ran(forks, folder, SCRIPT, ranks=2)
    text = SCRIPT.replace("'run'", "'second'")
    output = ran(forks, folder, text, ranks=2, code=143, START="run", **STOP)
    assert "started from run: 9 of 9 tensors" in output
    assert "started from" not in ran(forks, folder, text, ranks=2, START="gone")
    assert "start_from must name an existing file" in ran(forks, folder, text.replace("'second'", "'third'"), ranks=2,
                                                          code=2, START="gone")
