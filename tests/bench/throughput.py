"""How fast is it here? Images/s with 1 and 2 processes. The start and a save: tests/bench/start.py and saves.py.

    make throughput   (or: python tests/bench/throughput.py --repeats 5 --steps 600)

Each number is the median of the repeats, which take turns, so that a machine that is busy for a while slows both sides
of a ratio. Prints a table with its conditions. Nothing is asserted here.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.machine import conditions, markdown_table  # noqa: E402

WORLDS = (1, 2)


def train(world_size: int, run_dir: Path, *flags: str) -> dict[str, Any]:
    """The result of one training."""
    main = str(ROOT / "train/main.py")
    launch = [main, "launch", "--nproc", str(world_size), "--max-restarts", "0"] if world_size > 1 else []
    own = ["--run-dir", str(run_dir), "--name", "run", "--fresh", "--limit-eval", "512"]
    ran = subprocess.run(
        [sys.executable, *launch, main, "train", *own, *flags], cwd=run_dir, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if ran.returncode != 0:
        sys.exit(f"{' '.join(ran.args)} ended with {ran.returncode}:\n{ran.stdout}")
    return json.loads((run_dir / "run" / "result.json").read_text())  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="of each training")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 512], help="global, in samples")
    arguments = parser.parse_args()
    about, rows = conditions(), []
    with tempfile.TemporaryDirectory() as folder:
        for size in arguments.batch_sizes:
            speeds: dict[int, list[float]] = {world: [] for world in WORLDS}
            for repeat in range(arguments.repeats):
                print(f"batch {size}: {repeat + 1} of {arguments.repeats}", file=sys.stderr, flush=True)
                for world, found in speeds.items():
                    result = train(world, Path(folder), "--batch-size", str(size), "--max-steps", str(arguments.steps))
                    found.append(result["images_per_s"])
            one, two = (statistics.median(found) for found in speeds.values())
            what = f"images/s, {result['data']}, global batch {size}"
            rows.append([what, f"{one:,.0f}", f"{two:,.0f}", f"{two / one:.2f}"])
    print(f"{about}, one thread a process.\n")
    print("\n".join(markdown_table(["small CNN", "1 process", "2 processes", "ratio"], rows)))


if __name__ == "__main__":
    main()
