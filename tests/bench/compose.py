"""Measures two containers on this machine: their start, and their speed against two plain processes.

    python tests/bench/compose.py      # as root, with the image built; a table in Markdown
"""

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.rigs.containers import Project, project, why_not
from tests.rigs.jobs import MAIN, ended, free_port, rank_env, result, start

FASHION = "--model cnn --epochs 1 --log-every-steps 10 --name fashion"


def first_step_s(nodes: Project, run: str, args: str) -> float:
    """From `docker compose up` to the first step that the metrics show."""
    began_s = time.time()
    nodes.up(ARGS=f"{args} --log-every-steps 1")
    nodes.wait_for_step(run, 1)
    lines = (nodes.runs / run / "metrics.jsonl").read_text().splitlines()
    return float(json.loads(lines[0])["time"]) - began_s


def on_host(folder: Path) -> float:
    """Images/s of the same job in two processes of this machine."""
    port = free_port()
    job = start(sys.executable, MAIN, "train", *FASHION.split(), "--run-dir", folder, env=rank_env(0, 2, port))
    start(sys.executable, MAIN, "train", *FASHION.split(), "--run-dir", folder, env=rank_env(1, 2, port), job=job)
    with ended(job):
        assert job.wait(600) == [0, 0], job.output
    return float(result(folder / "fashion")["images_per_s"])


def main() -> None:
    if reason := why_not():
        sys.exit(reason)
    rows: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as folder, project(Path(folder)) as nodes:
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
    print("\n| | |\n|---|---|")
    for name, value in rows:
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
