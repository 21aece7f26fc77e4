"""The memory that a step frees stays with the process: the next step gets it without the kernel's help."""

import re
import statistics
import sys
from pathlib import Path

from tests.rigs import jobs
from tests.rigs.jobs import MAIN, ROOT

STEPS = 20
PAGES = 20_000  # 80 MB in pages of 4 KiB: what malloc gives back, and asks for again, unless it is set up
OWN = """
import resource
import torch
from torch import nn
from train.data import TensorSamples
from train.workloads.classification import Classification
from train.workloads.workload import Workload

def build(config):
    kind = Classification(num_classes=2, label_smoothing=0.0, prepare=torch.Tensor.float)

    def loss(model, batch):
        blocks = [torch.ones(5_000_000) for _ in range(4)]
        blocks.clear()
        torch.ones(50_000_000)  # 200 MB: more than glibc takes from the heap by its own rules
        print("page faults so far:", resource.getrusage(resource.RUSAGE_SELF).ru_minflt, flush=True)
        return kind.loss(model, batch)

    samples = TensorSamples(torch.zeros(64, 1, 2, 2, dtype=torch.uint8), torch.zeros(64, dtype=torch.int64))
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    return Workload(model=model, train=samples, evaluation=samples, loss=loss, evaluate=kind.evaluate)
"""


def test_steps_reuse_the_memory_that_earlier_ones_freed(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    line = ["--workload", "own:build", "--batch-size", "4", "--max-steps", str(STEPS), "--run-dir", tmp_path / "runs"]
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with jobs.ended(jobs.start(sys.executable, MAIN, "train", *line, env=path)) as job:
        assert job.wait() == [0], job.output
    counts = [int(count) for count in re.findall(r"page faults so far: (\d+)", job.output)]
    assert len(counts) >= STEPS
    late = [after - before for before, after in zip(counts[-12:], counts[-11:], strict=False)]
    # The median: now and then a block moves up in the heap, behind something small that stays
    assert statistics.median(late) < PAGES / 2, counts
