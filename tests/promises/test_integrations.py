"""transformers' and Lightning's Trainers with rankup's callbacks, and Accelerate, keep the promises of their pages."""

import importlib.util
import random
import re
import time
from pathlib import Path

import pytest

from rankup.observe.status import look
from tests.promises.test_examples import STRUCK, Once, digest, strike
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT

FOLDER = ROOT / "tests" / "rigs" / "integrations"
# The package that each script needs, and the optimizer steps of a run
LOOPS = {
    "trainer_loop": ("transformers", 45), "lightning_loop": ("lightning", 30), "accelerate_loop": ("accelerate", 30),
}
PACKAGES = {package: importlib.util.find_spec(package) is not None for package, _ in LOOPS.values()}
each = pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.skipif(not PACKAGES[package], reason=f"needs {package}"))
    for name, (package, _) in LOOPS.items()
])


def run(forks: Forks, folder: Path, name: str, other: Path | None = None, **env: str) -> tuple[list[int], str]:
    """Run two ranks in `folder`, or the second one in `other`, as on a node with a disk of its own."""
    words = (STRUCK, FOLDER / f"{name}.py")
    preload = "tests.rigs.struck:by_fork"
    return forks.run(*words, world_size=2, cwds=[folder, other or folder], preload=preload, env=env)


@each
def test_integrations_resume_to_the_same_weights(name: str, once: Once, loaded: Forks, tmp_path: Path) -> None:
    """First one rank is asked to stop. Then the same command resumes under `launch`, which loses a rank."""

    def undisturbed() -> str:
        (tmp_path / "undisturbed").mkdir()
        codes, output = run(loaded, tmp_path / "undisturbed", name)
        assert codes == [0, 0], output
        assert name != "trainer_loop" or re.search(r"rank 1 \(.*\) is \d+ % slower than the other", output), output
        return digest(tmp_path / "undisturbed", name)

    expected = once(f"integration-{name}", undisturbed)
    steps = LOOPS[name][1]
    stop = {"rank": 1, "call": random.randrange(2, steps // 2), "hold_s": 0.15}
    codes, output = run(loaded, tmp_path, name, MAX_EPOCHS="-1", **strike(tmp_path, signal="SIGTERM", **stop))
    assert codes == [143, 143], f"{stop}\n{output}"

    (tmp_path / "struck").unlink()
    blow = {"rank": 0, "call": random.randrange(2, steps // 2 - 6), "hold_s": 0.15}
    struck = strike(tmp_path, signal="SIGKILL", **blow)
    line = ("launch", "--nproc=2", STRUCK, FOLDER / f"{name}.py")
    codes, output = loaded.run(*line, cwds=[tmp_path], env=struck)
    lost, resumed = re.findall(r"(?:lost a peer at|resumed from) step[- ]0*(\d+)", output)[-2:]
    assert int(lost) <= int(resumed), f"{blow}\n{output}"  # from a rescue, or from a copy that was already there
    assert codes == [0], f"{stop} {blow}\n{output}"
    assert look(tmp_path / "runs" / name.partition("_")[0], now=time.time())["step"] == steps
    assert digest(tmp_path, name) == expected, f"{stop} {blow}\n{output}"


@pytest.mark.skipif(not PACKAGES["transformers"], reason="needs transformers")
def test_trainer_resumes_on_nodes_that_share_no_disk(loaded: Forks, tmp_path: Path) -> None:
    folders = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        folder.mkdir()
    stop = strike(tmp_path, signal="SIGTERM", rank=0, call=3, hold_s=0.15)
    codes, output = run(loaded, folders[0], "trainer_loop", folders[1], **stop)
    assert codes == [143, 143], output
    codes, output = run(loaded, folders[0], "trainer_loop", folders[1])
    assert codes == [0, 0], output
    assert "resumed from step-" in output
