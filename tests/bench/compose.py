"""Measures two containers on this machine: start, restart after kills, speed against two plain processes.

    python tests/bench/compose.py [--kills 10]      # as root, with the image built; a table in Markdown
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.rigs.containers import Project, project, why_not
from tests.rigs.jobs import MAIN, ended, free_port, rank_env, result, start

FASHION = "--model cnn --epochs 1 --log-every-steps 10 --name fashion"
ENDLESS = (
    "--dataset fake --fake-samples 20000 --batch-size 64 --model mlp --epochs 100000 --save-every-steps 100 "
    "--log-every-steps 1 --no-tensorboard --name endless"
)


def first_step_s(nodes: Project, run: str, args: str) -> float:
    """From `docker compose up` to the first step that the metrics show."""
    began_s = time.time()
    nodes.up(ARGS=f"{args} --log-every-steps 1")
    nodes.wait_for_step(run, 1)
    lines = (nodes.runs / run / "metrics.jsonl").read_text().splitlines()
    return float(json.loads(lines[0])["time"]) - began_s


def kills_s(nodes: Project, kind: str, node: str, count: int) -> list[float]:
    """From SIGKILL to the first step after it, `count` times."""
    took_s = []
    for _ in range(count):
        # More than 10 s of work, as in a real job: for one that fails earlier the engine waits longer and longer
        time.sleep(11)
        metrics = (nodes.runs / "endless" / "metrics.jsonl").stat().st_ino
        moment_s = time.time()
        (nodes.kill_rank if kind == "rank" else nodes.kill_container)(node)
        took_s.append(nodes.first_step_after("endless", moment_s, metrics))
    return took_s


def on_host(folder: Path) -> float:
    """Images/s of the same job in two processes of this machine."""
    port = free_port()
    job = start(sys.executable, MAIN, "train", *FASHION.split(), "--run-dir", folder, env=rank_env(0, 2, port))
    start(sys.executable, MAIN, "train", *FASHION.split(), "--run-dir", folder, env=rank_env(1, 2, port), job=job)
    with ended(job):
        assert job.wait(600) == [0, 0], job.output
    return float(result(folder / "fashion")["images_per_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="kills of each of the four kinds")
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    rows: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as folder, project(Path(folder), RESTARTS="10000") as nodes:
        rows.append(("`docker compose up` to the first step", f"{first_step_s(nodes, 'fashion', FASHION):.1f} s"))
        assert nodes.codes(timeout_s=600) == [0, 0], nodes.logs()
        nodes.remove()
        (nodes.runs / "fashion").rename(nodes.runs / "first")
        nodes.up(ARGS=FASHION)
        assert nodes.codes(timeout_s=600) == [0, 0], nodes.logs()
        containers = nodes.result("fashion")["images_per_s"]
        processes = on_host(Path(folder) / "host")
        text = f"{containers:,.0f} against {processes:,.0f}"
        rows.append(("images/s, two containers against two processes of the host", text))
        nodes.up(ARGS=ENDLESS)
        nodes.wait_for_step("endless", 200)
        for node in ("node1", "node0"):
            for kind in ("rank", "container"):
                took_s = kills_s(nodes, kind, node, options.kills)
                text = f"{statistics.median(took_s):.1f} s, worst of {len(took_s)} {max(took_s):.1f} s"
                rows.append((f"kill -9 of the {kind} of {node} to the first step after it", text))
    print("\n| | |\n|---|---|")
    for name, value in rows:
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
