"""Count found bit flips, correctly named ranks, and false alarms of healthy runs. rankup/corruption.md has the results.

`python -m bench.flips --runs 100 --log flips.jsonl` runs tests/job/corrupt_script.py 100 times with one random
bit of one random rank flipped at a random step, and 100 times without, in turns. It resumes where its log ends.
`--kinds before shard` flips bits that no comparison sees. `--kinds product product-fsdp --rate 0.1` breaks a rank for
good: this fraction of its forward passes has one wrong bit in a product, and all ranks recompute every fifth step.
"""

import argparse
import json
import os
import random
import re
import tempfile
from collections import Counter
from pathlib import Path

from rankup.loop.agreement import RECORD
from tests.rigs.fork_server import Forks

SCRIPT = Path(__file__).parents[1] / "tests" / "job" / "corrupt_script.py"
KINDS = ("weight", "optimizer", "gradient")
RECOMPUTE, STEPS = 5, 40


def run(forks: Forks, dice: random.Random, number: int, kinds: list[str], rate: float) -> dict[str, object]:
    """Run the script once. Return what was flipped and what was found. Every second run is healthy."""
    ranks, kind = (2, 3)[number // 2 % 2], kinds[number // 4 % len(kinds)]
    rank, step, bit = dice.randrange(ranks), dice.randrange(2, 38), dice.randrange(32)
    lasts, split = kind.startswith("product"), kind in ("shard", "product-fsdp")
    flips = f"product:{rank}:{rate}:0" if lasts else f"{'weight' if kind == 'shard' else kind}:{rank}:{step}:{bit}"
    env = {"RECOMPUTE": str(RECOMPUTE)} if lasts else {}
    env |= {"SPLIT": "1"} if split else {}
    if number % 2:
        env["FLIP"] = flips
    with tempfile.TemporaryDirectory(prefix="flips-") as folder:
        job = Path(folder) / "run"
        codes, output = forks.run("launch", f"--nproc={ranks}", *(["--max-restarts=0"] if lasts else []), SCRIPT, job,
                                  cwds=[Path(folder)], timeout_s=900, env=env)
        record = job / RECORD
        rows = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    digest = next((line.split()[-1] for line in output.splitlines() if " digest " in f" {line}"), "")
    computed = re.search(r"silent corruption before step (\d+): (.*) computed other", output)
    return {"kind": kind if number % 2 else "none", "group": f"{ranks} ranks{', fsdp' if split else ''}",
            "ranks": ranks, "rank": rank, "step": step, "bit": bit, "codes": codes, "digest": digest,
            "words": output.count("silent corruption"), "found": [[row["step"] - step, row["odd"]] for row in rows],
            "recomputed": [int(computed[1]) - 1, re.findall(r"rank (\d+)", computed[2])] if computed else None}


def verdict(row: dict[str, object], undisturbed: dict[str, str]) -> str:
    ranks, found = row["ranks"], row["found"]
    same = row["digest"] == undisturbed.get(row["group"]) and row["codes"] == [0]
    if row["kind"] == "none":
        return "healthy" if same and not row["words"] and not found else "a false alarm"
    if recomputed := row["recomputed"]:
        return "found, named" if recomputed[1] == [str(row["rank"])] else f"found, named {recomputed[1]}: {row}"
    if not found:
        return "no trace, and the same weights at the end" if same else "not found"
    right = [row["rank"]] if ranks > 2 else [0, 1]
    steps = found[0][0]
    if len(found) == 1 and 0 < steps <= 6 and found[0][1] == right and same:
        return "found in 1 to 6 steps, the right rank named, the same weights at the end"
    return f"found, but: {row}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--log", type=Path, default=Path("flips.jsonl"))
    parser.add_argument("--kinds", nargs="+", default=[*KINDS])
    parser.add_argument("--rate", type=float, default=0.1)
    given = parser.parse_args()
    os.nice(19)
    rows = [json.loads(line) for line in given.log.read_text().splitlines()] if given.log.exists() else []
    with tempfile.TemporaryDirectory(prefix="flips-") as folder, given.log.open("a", encoding="utf-8") as log:
        forks = Forks(Path(folder))
        for number in range(len(rows), 2 * given.runs):
            rows.append(run(forks, random.Random(number), number, given.kinds, given.rate))
            log.write(f"{json.dumps(rows[-1])}\n")
            log.flush()
        forks.close()
    undisturbed = {group: Counter(row["digest"] for row in rows if row["kind"] == "none" and row["group"] == group)
                   .most_common(1)[0][0] for group in {row["group"] for row in rows}}
    counts = Counter((row["kind"], row["group"], verdict(row, undisturbed)) for row in rows)
    for (kind, group, what), count in sorted(counts.items()):
        print(f"{count:4} {kind:12} {group:14} {what}")
    for kind in sorted(kind for kind in given.kinds if kind.startswith("product")):
        ends = [row["recomputed"] for row in rows if row["kind"] == kind]
        computed = sum(end[0] // RECOMPUTE + 1 if end else STEPS // RECOMPUTE for end in ends)
        print(f"{kind}: {sum(map(bool, ends))} found in {computed} recomputations, rate {given.rate}")


if __name__ == "__main__":
    main()
