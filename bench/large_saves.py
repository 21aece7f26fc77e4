"""Measure how long a save of a large plain state holds up its loop, beside torch.distributed.checkpoint's async_save.

    python bench/large_saves.py --megabytes 100 1000

One process saves a state of each size by `job.save` with `save="sync"` and in the background, and by `async_save` into
a folder of the same disk. The three take turns. The table has the median time for which the call holds up the loop, and
its share of a synchronous save; the first save of each kind, which allocates memory, is left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.machine import conditions, markdown_table
from tests.rigs.jobs import ROOT

SCRIPT = """
import json, os, sys, time, warnings
import torch, rankup
import torch.distributed.checkpoint as dcp

warnings.simplefilter("ignore")
how, layers, found = sys.argv[1], int(sys.argv[2]), []
job = rankup.init("run", tensorboard=False, save_every_steps=0, save="sync" if how == "sync" else "auto")
torch.set_num_threads(1)
state = {f"layer{n}": torch.randn(2560, 2560) for n in range(layers)}  # 25 MiB each
job.track(state=state)
for step in job.steps(4):
    with job.step():
        state["layer0"] += 1
    began_s = time.perf_counter()
    if how == "async_save":
        done = dcp.async_save(state, checkpoint_id=f"other-{step}")
    else:
        job.save()
    found.append(time.perf_counter() - began_s)
    if how == "async_save":
        done.result()
    elif job.run.saver.writing.under_way:
        job.run.saver.writing.join()
print("found", json.dumps(found[1:]))
os._exit(0)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    found = defaultdict[tuple[int, str], list[float]](list)
    for megabytes in options.megabytes:
        for _ in range(options.repeats):
            for how in ("sync", "background", "async_save"):
                with tempfile.TemporaryDirectory() as folder:
                    line = [sys.executable, "-c", SCRIPT, how, str(max(1, round(megabytes / 26.2)))]
                    done = subprocess.run(line, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
                                          capture_output=True, text=True, check=True)
                    found[megabytes, how] += json.loads(done.stdout.rpartition("found ")[2])
    rows = []
    for (megabytes, how), values in found.items():
        held_s, sync_s = statistics.median(values), statistics.median(found[megabytes, "sync"])
        rows.append([str(megabytes), how, f"{held_s:.2f}", f"{held_s / sync_s:.1%}"])
    print(f"{conditions()}\n")
    print("\n".join(markdown_table(["state, MB", "save", "holds the loop up, s", "of sync"], rows)))


if __name__ == "__main__":
    main()
