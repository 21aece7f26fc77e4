"""Memory that a step frees stays with the process, so the next step gets it without the kernel."""

import re
from pathlib import Path

import pytest

from tests.rigs.fork_server import Forks

STEPS = 20
LATE = 11  # only this many last steps are checked
OWN = """
import resource
import torch
from torch import nn
from train.data.samples import TensorSamples
from train.workloads.classification import Classification
from train.workloads import Workload

def build(config):
    kind = Classification(num_classes=2, label_smoothing=0.0, prepare=torch.Tensor.float)

    def loss(model, batch):
        blocks = [torch.ones(NUMBERS) for _ in range(COUNT)]
        blocks.clear()
        print("page faults so far:", resource.getrusage(resource.RUSAGE_SELF).ru_minflt, flush=True)
        return kind.loss(model, batch)

    samples = TensorSamples(torch.zeros(64, 1, 2, 2, dtype=torch.uint8), torch.zeros(64, dtype=torch.int64))
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    return Workload(model=model, train=samples, evaluation=samples, loss=loss, evaluate=kind.evaluate)
"""


@pytest.mark.parametrize(("count", "numbers"), [
    (4, 5_000_000),
    (1, 50_000_000),  # larger than any block that glibc takes from the heap, whatever its settings
])
def test_steps_reuse_the_memory_that_earlier_steps_freed(
    count: int, numbers: int, forks: Forks, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN.replace("NUMBERS", str(numbers)).replace("COUNT", str(count)))
    line = ["--workload", "own:build", "--batch-size", "4", "--max-steps", str(STEPS), "--run-dir", tmp_path / "runs"]
    output = forks.ends("train", *line, cwds=[tmp_path])
    counts = [int(found) for found in re.findall(r"page faults so far: (\d+)", output)]
    assert len(counts) >= STEPS
    late = counts[-1] - counts[-1 - LATE]
    # Memory that goes back to the kernel costs a fault per page of 4 KiB in each step. That may happen in two steps,
    # because blocks sometimes move up in the heap, behind something small that stays
    assert late < 3 * count * numbers * 4 / 4096, counts
