"""Batches that are loaded again, or on the training's own random state, are those of an undisturbed run, or one line
says that they are not."""

import signal
from pathlib import Path

import pytest

from tests.job.test_loop import ran, said
from tests.rigs.fork_server import Forks

# Everything that draws random numbers to load a batch in the training's process, and code outside of steps that draws
# them too. `seen` holds all that was drawn for steps
DRAWS = """
import os, random, numpy, torch, rankup
from torch.utils.data import DataLoader, IterableDataset

class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return random.random() + numpy.random.rand() + torch.rand(()).item() + index

class Stream(IterableDataset):
    def __iter__(self):
        return (torch.rand(()).item() + index for index in range(12))

class Lazy:  # a sampler that draws while the workers already load
    def __len__(self):
        return 12
    def __iter__(self):
        return (random.randrange(1000) for _ in range(12))

def collate(samples):
    return torch.tensor(samples) + torch.rand(len(samples))

job, seen = rankup.init('run'), []
job.track(seen=seen)
loader = KIND
for epoch in job.epochs(int(os.environ.get('EPOCHS', '2'))):
    order = torch.randperm(100).tolist()  # a user's own order of this epoch
    for part in (0, 1):  # two passes
        more = torch.rand(()).item()
        for x in job.batches(loader if part == 0 else [1.0, 2.0]):
            with job.step():
                seen.append(torch.as_tensor(x).double().sum().item() + order[job.step_number] + more)
            if os.environ.get('DIE') == f'{epoch}:{part}':
                job.save(wait=True)
                os.kill(os.getpid(), 9)
            if job.step_number % 3:
                torch.rand(3), random.random(), numpy.random.rand()  # an evaluation inside the epoch
    own = torch.rand(()).item()
    for x in DataLoader(Noise(), batch_size=6, shuffle=True):  # a plain evaluation
        own += torch.rand(()).item()
    with job.change():
        seen.append(own)
print('seen', seen)
job.finish()
"""
KINDS = {
    "samples": "DataLoader(Noise(), batch_size=4, shuffle=True)",
    "collate": "DataLoader(range(12), batch_size=4, collate_fn=collate)",
    "samples one by one": "DataLoader(Noise(), batch_size=None, sampler=torch.utils.data.RandomSampler(range(3)))",
    "stream": "DataLoader(Stream(), batch_size=4)",
    "drawn while workers load": "DataLoader(range(1000), batch_size=None, sampler=Lazy(), num_workers=1)",
}


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_batches_depend_on_nothing_that_was_drawn_before(forks: Forks, tmp_path: Path, kind: str) -> None:
    """The runs resume after an epoch, inside the first pass of an epoch, and inside its second pass."""
    text = DRAWS.replace("KIND", KINDS[kind])
    whole = said(ran(forks, tmp_path, text), "seen")
    for how in ({"EPOCHS": "1"}, {"DIE": "1:0"}, {"DIE": "1:1"}):
        (tmp_path / "run").rename(tmp_path / f"before {how}")
        ran(forks, tmp_path, text, **how, code=-signal.SIGKILL if "DIE" in how else 0)
        assert said(ran(forks, tmp_path, text), "seen") == whole, how


def test_steps_resume_with_the_random_numbers_that_an_evaluation_does_not_change(forks: Forks, tmp_path: Path) -> None:
    text = (
        "import os, torch, rankup\njob, seen = rankup.init('run', save_every_steps=1), []\njob.track(seen=seen)\n"
        "for step in job.steps(6):\n    x = torch.rand(()).item()\n    with job.step():\n        seen.append(x)\n"
        "    if step == 3 and 'DIE' in os.environ:\n        job.run.saver.wait()\n        os.kill(os.getpid(), 9)\n"
        "    if step == 3:\n        torch.rand(3)\nprint('seen', seen)\njob.finish()\n"
    )
    whole = said(ran(forks, tmp_path, text), "seen")
    (tmp_path / "run").rename(tmp_path / "whole")
    ran(forks, tmp_path, text, DIE="1", code=-signal.SIGKILL)
    assert said(ran(forks, tmp_path, text), "seen") == whole
