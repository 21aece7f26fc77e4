"""Each call of a job checks its arguments: a value that can't work is one line and code 2 on all ranks."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rankup.agent.logs import host_name
from rankup.errors import UserError
from rankup.loop.arguments import whole_number
from tests.job.test_loop import ran
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import metrics

REFUSED = {
    "next(job.epochs('3'))": "job.epochs: the count must be a whole number >= 0, got '3'. Give it as int.",
    "next(job.epochs(None))": "job.epochs: the count must be a whole number >= 0, got None.",
    "next(job.epochs(-1))": "job.epochs: the count must be a whole number >= 0, got -1.",
    "next(job.epochs(True))": "job.epochs: the count must be a whole number >= 0, got True.",
    "next(job.steps(2.5))": "job.steps: the total must be a whole number >= 0, got 2.5.",
    "next(job.steps(float('inf')))": "job.steps: the total must be a whole number >= 0, got inf.",
    "next(job.steps(torch.tensor(2.0)))": "job.steps: the total must be a whole number >= 0, got tensor(2.).",
    "job.batches(None)": "batches: the loader must be a DataLoader or another iterable of batches, got None.",
    "job.batches(model)": "batches: the loader must be a DataLoader or another iterable of batches, got Linear(",
    "job.batches({'train': loader})": "batches: the loader must be a DataLoader or another iterable of batches, got {",
    "job.batches('train')": "batches: the loader must be a DataLoader or another iterable of batches, got 'train'.",
    "job.batches(loader, any_order='no')": "batches: any_order must be True or False, got 'no'.",
    "job.batches(loader, prefetch=1.0)": "batches: prefetch must be a whole number >= 0, got 1.0.",
    "job.cycle(5)": "batches: the loader must be a DataLoader or another iterable of batches, got 5.",
    "next(job.eval_batches(None))": "eval_batches: the loader must be a DataLoader or another iterable of batches",
    "next(job.eval_batches(loader, pad='no'))": "eval_batches: pad must be True or False, got 'no'.",
    "job.evaluate(loader, None)": "evaluate: after the loader there must be a function of a batch, got None.",
    "job.evaluate(loader, lambda x: {'a': (1, -1)})": "job.evaluate: a must be a pair of a sum and a count >= 0, got",
    "job.log(a=(1, float('nan')))": "job.log: a must be a pair of a sum and a count >= 0, got the count nan.",
    "job.log(a='1.5')": "job.log: a must be a number, got str.",
    "job.log(prefix=None, a=1)": 'log: prefix must be a word other than "train" and "job", got "None".',
    "job.save(wait='no')": "save: wait must be True or False, got 'no'.",
    "job.end(None)": "end: the reason must be a text, got None.",
    "job.phase(None, 3).__enter__()": "phase: the name must be a text, got None.",
    "job.phase('x', None).__enter__()": "phase: the deadline of x must be a number of seconds >= 0, got None.",
    "job.phase('x', -1).__enter__()": "phase: the deadline of x must be a number of seconds >= 0, got -1.",
    "job.gather(numpy.ones(2))": "gather: a value must consist of numbers, texts, tensors, and lists and dicts of "
    "these, got numpy.ndarray. Convert it, as by torch.as_tensor.",
    "job.gather({'x': [lambda: 1]})": "gather: a value must consist of numbers, texts, tensors, and lists and dicts of "
    "these, got builtins.function.",
    "job.backward('x').__enter__()": "backward: the loss must be a tensor, got 'x'.",
    "rankup.spawn(None)": "spawn: it must have a function, got None.",
    "rankup.spawn(print, nproc=0)": "spawn: nproc must be a whole number >= 1, got 0.",
    "rankup.spawn(print, nproc='2')": "spawn: nproc must be a whole number >= 1, got '2'.",
    "job.recompute(None, 1)": "recompute: it must have a function that returns the loss, got None.",
}


def test_arguments_that_cannot_work_are_refused_in_one_line_on_all_ranks(forks: Forks, tmp_path: Path) -> None:
    output = ran(forks, tmp_path, f"""
import numpy, torch, rankup
job, model = rankup.init("run"), torch.nn.Linear(1, 1)
loader = torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2)
job.track(count={{"n": 0}})
for call in {[*REFUSED]}:
    try:
        eval(call)
    except rankup.UserError as error:
        print(call, "->", error)
next(job.epochs("3"))
""", ranks=2, code=2)
    for call, why in REFUSED.items():
        assert output.count(f"{call} -> {why}") == 2, call
    assert output.count("error: job.epochs: the count must be") == 2


@pytest.mark.parametrize(("values", "why"), [
    ("{f'x{job.rank}': 1.0}", "got x0 on rank 0 (HOST) and x1 on rank 1 (HOST)"),
    ("{'x': 1.0, **({'y': 2.0} if job.rank else {})}", "got x on rank 0 (HOST) and x, y on rank 1 (HOST)"),
    ("{'x': 1.0} if job.rank or step < 4 else {}", "got none on rank 0 (HOST) and x on rank 1 (HOST)"),
    ("{'x': 1.0, 'y': 2.0} if job.rank else {'y': 2.0, 'x': 1.0}", ""),
    ("{'x': 1.0} if step % 2 else {'y': 2.0}", ""),
], ids=["other", "more", "later", "other-order", "alternating"])
def test_values_of_a_step_with_other_names_on_a_rank_are_refused(
    values: str, why: str, forks: Forks, tmp_path: Path
) -> None:
    output = ran(forks, tmp_path, f"""
import rankup
job, count = rankup.init("run", tensorboard=False, log_every_steps=1), {{"n": 0}}
job.track(count=count)
for step in job.steps(6):
    with job.step(**{values}):
        count["n"] += 1
job.finish()
""", ranks=2, code=2 if why else 0)
    text = "error: job.step: the names of the values must be the same on all ranks, "
    assert (text + why.replace("HOST", host_name()) in output) == bool(why)
    if not why:
        lines, named = metrics(tmp_path / "run"), {"train/x": 1.0, "train/y": 2.0}
        pairs = [pair for line in lines for pair in line.items() if pair[0] in named]
        assert {*pairs} == {*named.items()}
        assert len(pairs) == (6 if "%" in values else 12)


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), torch.tensor(3)])
def test_whole_numbers_of_numpy_and_torch_are_whole_numbers(value: object) -> None:
    assert type(whole_number("count", value)) is int
    with pytest.raises(UserError, match="count must be a whole number >= 4, got "):
        whole_number("count", value, least=4)
