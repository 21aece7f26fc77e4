"""Sharded state outlives its rank: the next attempt resumes from the parts that ranks keep in their node's memory."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.promises.test_examples import STRUCK, Once, strike
from tests.rigs.checkpoints import flip
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import MAIN, ROOT, comparable_metrics, kill, result
from tests.rigs.small_filesystems import own_folder

# 8 steps an epoch
SETTINGS = ("--workload=tests.rigs.faulting_workload:build", "--parallel=fsdp", "--batch-size=8", "--max-steps=22",
            "--save-every-steps=8", "--memory-every-steps=3", "--log-every-steps=1", "--tensorboard=false",
            "--optimizer=adamw", "--lr=0.01", "--name=run", "--join-timeout-s=60")
SHARDED = "--checkpoint-format=sharded"
FROM_MEMORY = "resumed from step {}, whose parts were all in memory"


def train(folder: Path, *more: str) -> tuple[str, ...]:
    return ("train", *SETTINGS, f"--run-dir={folder}", *more)


def seen(run: Path) -> dict[str, Any]:
    return {"digest": result(run)["digest"], "metrics": comparable_metrics(run)}


@pytest.fixture(scope="module")
def undisturbed(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    forks.ends(*train(folder, "--memory-every-steps=0"), world_size=2)
    return seen(folder / "run")


def in_memory(folder: Path) -> list[Path]:
    run = json.loads((folder / "run" / "run.json").read_text())["run"]
    return sorted(Path(f"/dev/shm/rankup-{os.getuid()}").glob(f"{run}.*/*"))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", [(), (SHARDED,)], ids=["plain", "sharded"])
def test_killed_rank_costs_only_the_steps_since_the_last_part(
    forks: Forks, tmp_path: Path, undisturbed: dict[str, Any], rank: int, how: tuple[str, ...]
) -> None:
    """The rank is killed in step 13, after the part of step 12 is written. Its next incarnation has fewer steps."""
    line = ("launch", "--nproc=2", MAIN, *train(tmp_path, *how))
    output = forks.ends(*line, env=kill(rank, step=13))
    assert FROM_MEMORY.format(12) in output
    assert output.count("resumed from") == 1
    assert seen(tmp_path / "run") == undisturbed
    assert in_memory(tmp_path) == []


def test_parts_are_kept_by_default_before_any_checkpoint(forks: Forks, tmp_path: Path) -> None:
    """rankup itself chooses how often: at half a percent of the time. The first part is that of step 1."""
    line = ("launch", "--nproc=2", MAIN, *train(tmp_path), "--memory-every-steps=null", "--save-every-steps=0")
    output = forks.ends(*line, env=kill(1, step=5))
    assert FROM_MEMORY.format(1) in output


def test_too_little_memory_gives_one_line(forks: Forks, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    output = forks.ends(*train(tmp_path), world_size=2, preload=f"{__name__}:no_memory")
    assert output.count("no part of the state is kept in memory from now on: /dev/shm has 0 MiB free, ") == 1
    assert seen(tmp_path / "run") == undisturbed


def no_memory() -> None:
    """Preloaded. Rank 1 finds no free memory."""
    from rankup.state import memory, parts

    if os.environ["RANK"] == "1":
        parts.memory_available = lambda: 0
        memory.homes = lambda: [Path(f"/dev/shm/rankup-{os.getuid()}")]


class Nodes:
    """Two nodes with a memory of their own and one shared disk."""

    def __init__(self, forks: Forks, folder: Path, *, ranks: int = 1) -> None:
        self.forks, self.folder = forks, folder
        for number in (0, 1):
            (folder / f"node{number}" / "memory").mkdir(parents=True)
            (folder / f"node{number}" / "runs").symlink_to(folder)
        self.cwds = [folder / f"node{number}" for number in (0, 1) for _ in range(ranks)]

    def run(self, *line: str | Path, preload: str = "own_memory", code: int | list[int] = 0, **env: str) -> str:
        more: dict[str, Any] = {"world_size": len(self.cwds), "cwds": self.cwds, "env": env, "code": code}
        return self.forks.ends(*(line or train(self.folder)), **more, preload=f"{__name__}:{preload}")

    def lose(self, *numbers: int) -> None:
        for number in numbers:
            shutil.rmtree(self.folder / f"node{number}" / "memory")
            (self.folder / f"node{number}" / "memory").mkdir()

    def damage(self, *parts: tuple[int, int]) -> None:
        """Damage parts in a node's memory. `parts`: pairs of a node and the rank whose part it holds."""
        for node, rank in parts:
            for path in self.folder.glob(f"node{node}/memory/rankup-*/*{rank}/step-*/*.safetensors"):
                flip(path, -1)


def own_memory() -> None:
    """Preloaded. Replace /dev/shm by a folder of this rank's node."""
    own_folder("/dev/shm", Path("memory").absolute())
    if os.environ.get("STRIKE") or os.environ.get("MESH"):
        from tests.rigs.struck import by_fork

        by_fork()


@pytest.mark.parametrize(("lost", "damaged", "more", "resumed"), [
    ((), (), ("--memory-every-steps=0",), "resumed from step-00000008"),
    ((0,), (), (), FROM_MEMORY.format(12)), ((1,), (), (), FROM_MEMORY.format(12)),
    ((0, 1), (), (), "resumed from step-00000008"),
    ((), ((0, 0), (1, 1)), (), FROM_MEMORY.format(12)), ((0,), ((1, 1),), (), "resumed from step-00000008"),
    ((0,), ((1, 0),), (), "resumed from step-00000008"),
], ids=["off", "node 0", "node 1", "both", "damaged", "lost and damaged", "damaged where the other part was lost"])
def test_node_holds_the_parts_of_the_other_node(
    forks: Forks, tmp_path: Path, undisturbed: dict[str, Any], lost: tuple[int, ...],
    damaged: tuple[tuple[int, int], ...], more: tuple[str, ...], resumed: str,
) -> None:
    nodes = Nodes(forks, tmp_path)
    nodes.run(code=[171, -9], **kill(1, step=13))
    assert len([*tmp_path.glob("node*/memory/rankup-*/*/*")]) >= 4
    nodes.lose(*lost)
    nodes.damage(*damaged)
    output = nodes.run(*train(tmp_path, *more))
    passed_over = [node for node, rank in damaged if node == rank]  # by the rank that owns the part
    assert output.count("/step-00000012: ") == len(passed_over)
    assert resumed in output
    assert seen(tmp_path / "run") == undisturbed
    assert more or list(tmp_path.glob("node*/memory/rankup-*/*")) == []


LOOP = (STRUCK, ROOT / "tests" / "rigs" / "split_loop.py")


def ends(output: str) -> set[str]:
    return {line.partition(" ends with ")[2] for line in output.splitlines() if " ends with " in line}


@pytest.mark.parametrize(("mesh", "lost"), [("[2]", ()), ("[2]", (1,)), ("[2, 2]", (1,))], ids=["rank", "node", "hsdp"])
def test_own_sharded_loop_resumes_with_the_states_of_its_loaders(
    once: Once, forks: Forks, tmp_path: Path, mesh: str, lost: tuple[int, ...]
) -> None:
    """Hybrid sharding needs no second copy of a part: the other node holds the same part."""
    ranks = 2 if mesh == "[2, 2]" else 1

    def compute() -> str:
        (end,) = ends(Nodes(forks, tmp_path / "undisturbed", ranks=ranks).run(*LOOP, MESH=mesh))
        return end

    nodes = Nodes(forks, tmp_path, ranks=ranks)
    codes = [171, -9, 171, 171][: 2 * ranks]
    nodes.run(*LOOP, code=codes, MESH=mesh, **strike(tmp_path, signal="SIGKILL", rank=1, call=24))
    held = [path.parts[-2].rpartition(".")[2] for path in tmp_path.glob("node0/memory/rankup-*/*/step-*")]
    assert {*held} == {"rank-00000", "rank-00001"}
    nodes.lose(*lost)
    output = nodes.run(*LOOP, MESH=mesh)
    assert "whose parts were all in memory" in output
    assert ends(output) == {once(f"split-{mesh}", compute)}, output
