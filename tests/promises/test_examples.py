"""The loops of train/examples/, other people's training scripts with a few lines of rankup, keep the promises.

After a lost rank, or after a stop and the same command again, they end with the weights of an undisturbed run.
tests/rigs/struck.py counts optimizer steps from outside the scripts.
"""

import difflib
import hashlib
import json
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT

EXAMPLES = ROOT / "train" / "examples"
STRUCK = ROOT / "tests" / "rigs" / "struck.py"
# Number of ranks, and optimizer steps of each rank in a run. With three ranks DDP's buckets change the order of sums
LOOPS = {"ddp": (3, 33), "imagenet": (3, 42), "gpt": (3, 40), "fsdp": (3, 33), "gan": (3, 90), "rl": (3, 40)}
each = pytest.mark.parametrize("name", LOOPS)
SCRIPTS = {name: EXAMPLES / f"{name}.py" for name in LOOPS} | {"ddp": EXAMPLES / "repository" / "train.py"}
Once = Callable[[str, Callable[[], str]], str]


def saved(folder: Path, name: str) -> Path:
    """Return the file of weights that the script writes."""
    return folder / "runs" / "ddp.pt" if name == "ddp" else folder / f"{name}.pt"


def digest(folder: Path, name: str) -> str:
    """Return the digest of the weights that the script saved. A file of torch.save is a zip, so torch is not needed."""
    with zipfile.ZipFile(saved(folder, name)) as file:
        parts = sorted(entry for entry in file.namelist() if "/data/" in entry)
        assert parts
        return hashlib.sha256(b"".join(file.read(part) for part in parts)).hexdigest()


def weights(folder: Path, name: str) -> torch.Tensor:
    """Return all saved weights as one flat tensor."""
    leaves = tree_leaves(torch.load(saved(folder, name), weights_only=True))
    return torch.cat([each.double().flatten() for each in leaves if isinstance(each, torch.Tensor)])


def strike(folder: Path, **what: Any) -> dict[str, str]:
    return {"STRIKE": json.dumps({"rank": -1, "marker": str(folder / "struck"), **what})}


def by_hand(
    forks: Forks, folder: Path, script: Path, *, ranks: int, env: dict[str, str] | None = None
) -> tuple[set[int], str]:
    """Run ranks without a launcher, with the five variables set. Return their exit codes and output."""
    codes, output = forks.run(STRUCK, script, world_size=ranks, cwds=[folder] * ranks,
                              preload="tests.rigs.struck:by_fork", env=env)
    return {*codes}, output


def undisturbed(once: Once, forks: Forks, folder: Path, name: str, ranks: int) -> Path:
    """Return the folder of an undisturbed run."""

    def compute() -> str:
        (folder / "undisturbed").mkdir()
        codes, output = by_hand(forks, folder / "undisturbed", SCRIPTS[name], ranks=ranks)
        assert codes == {0}, output
        return str(folder / "undisturbed")

    return Path(once(f"example-{name}-{ranks}", compute))


def script_before(name: str) -> str:
    """Return the example without the lines of rankup: undo each part of its diff."""
    text = SCRIPTS[name].read_text()
    for part in re.split(r"(?m)^@@.*\n", (EXAMPLES / f"{name}.diff").read_text())[1:]:
        lines = part.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +"))
        assert text.count(after) == 1, after
        text = text.replace(after, before)
    return text


@each
def test_examples_change_at_most_seven_lines(name: str) -> None:
    """Count changed and added lines, but neither blank lines nor lines that are only indented further. `eval_batches`
    may be on an eighth one."""
    before, after = script_before(name).splitlines(), SCRIPTS[name].read_text().splitlines()
    moved = difflib.ndiff([line.strip() for line in before], [line.strip() for line in after])
    changed = [line for line in moved if line.startswith("+ ") and line.strip() != "+"]
    assert 0 < len(changed) <= 7 + ("eval_batches" in SCRIPTS[name].read_text()), changed
    assert 50 <= len(before) <= 110
    assert not re.search("rankup|job", "\n".join(before))


@each
def test_examples_take_their_device_from_the_job(name: str) -> None:
    """No example reads a launcher's variables: as one process of `python` on a GPU machine it has none."""
    script = SCRIPTS[name].read_text()
    assert "job.device" in script
    assert not re.search(r"os\.environ|getenv|torch\.cuda\.is_available", script)


def test_example_without_rankup_trains_too(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "before.py").write_text(script_before("ddp"))
    (tmp_path / "runs").mkdir()
    codes, output = by_hand(forks, tmp_path, tmp_path / "before.py", ranks=2)
    assert codes == {0}, output
    assert digest(tmp_path, "ddp")


@each
def test_examples_have_the_same_weights_after_a_stop_and_a_killed_rank(
    name: str, once: Once, forks: Forks, tmp_path: Path
) -> None:
    """Only one rank gets the signal, and all ranks save the same step and leave. `launch` then resumes the script."""
    ranks, calls = LOOPS[name]
    stop = {"rank": random.randrange(ranks), "call": random.randrange(2, calls // 2), "hold_s": 0.15}
    asked = strike(tmp_path, signal="SIGTERM", **stop)
    codes, output = by_hand(forks, tmp_path, SCRIPTS[name], ranks=ranks, env=asked)
    assert codes == {143}, f"{stop}\n{output}"
    assert not saved(tmp_path, name).exists()

    (tmp_path / "struck").unlink()
    blow = {"rank": random.randrange(ranks), "call": random.randrange(2, calls // 3), "delay_s": random.random() * 0.05}
    line = ("launch", f"--nproc={ranks}", STRUCK, SCRIPTS[name])
    [code], output = forks.run(*line, cwds=[tmp_path], env=strike(tmp_path, signal="SIGKILL", **blow))
    assert code == 0, f"{stop} {blow}\n{output}"
    assert (tmp_path / "struck").exists()
    expected = digest(undisturbed(once, forks, tmp_path, name, ranks), name)
    assert digest(tmp_path, name) == expected, f"{stop} {blow}\n{output}"


@each
def test_examples_resume_with_three_ranks_after_two_were_stopped(
    name: str, once: Once, forks: Forks, tmp_path: Path
) -> None:
    """The weights are only close to an undisturbed run's: each rank's batch size stays, so the global batch grows."""
    script, calls = SCRIPTS[name], LOOPS[name][1]
    stop = strike(tmp_path, signal="SIGTERM", rank=0, call=calls // 3, hold_s=0.15)
    codes, output = by_hand(forks, tmp_path, script, ranks=2, env=stop)
    assert codes == {143}, output
    codes, output = by_hand(forks, tmp_path, script, ranks=3)
    assert codes == {0}, output
    assert re.search("resumed from step-0*[1-9]", output), output
    own, whole = weights(tmp_path, name), weights(undisturbed(once, forks, tmp_path, name, LOOPS[name][0]), name)
    assert (own - whole).norm() < (0.3 if name in ("imagenet", "rl") else 0.1) * whole.norm(), output


def test_rank_lost_in_a_sharded_save_causes_a_restart_and_no_stop(once: Once, forks: Forks, tmp_path: Path) -> None:
    """Rank 0 waits for the lost rank's part until its agent sends SIGTERM. This SIGTERM must not stop the job."""
    line = ("launch", "--nproc=3", STRUCK, EXAMPLES / "fsdp.py")
    blow = strike(tmp_path, signal="SIGKILL", rank=1, call=20, **{"in": "fsync"})
    output = forks.ends(*line, cwds=[tmp_path], env=blow)
    assert (tmp_path / "struck").exists()
    assert digest(tmp_path, "fsdp") == digest(undisturbed(once, forks, tmp_path, "fsdp", 3), "fsdp"), output
