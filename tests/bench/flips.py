"""How many flipped bits are found, who is named, and how many healthy runs hear a false word: rankup/corruption.md.

`python -m tests.bench.flips --runs 100 --log flips.jsonl` does so many runs of tests/job/corrupt_script.py with one
random bit of one random rank flipped at a random step, and as many healthy ones between. It goes on where its log ends.
"""

import argparse
import json
import os
import random
import tempfile
from collections import Counter
from pathlib import Path

from rankup.loop.agreement import RECORD
from tests.rigs.fork_server import Forks

SCRIPT = Path(__file__).parents[1] / "job" / "corrupt_script.py"
KINDS = ("weight", "optimizer", "gradient")


def run(forks: Forks, dice: random.Random, number: int) -> dict[str, object]:
    """One flip and what came of it; each second one is a healthy run."""
    ranks, kind = (2, 3)[number // 2 % 2], KINDS[number // 4 % 3] if number % 2 else "none"
    rank, step, bit = dice.randrange(ranks), dice.randrange(2, 38), dice.randrange(32)
    with tempfile.TemporaryDirectory(prefix="flips-") as folder:
        job = Path(folder) / "run"
        codes, output = forks.run("launch", f"--nproc={ranks}", SCRIPT, job, cwds=[Path(folder)], timeout_s=900,
                                  env={"FLIP": f"{kind}:{rank}:{step}:{bit}"})
        record = job / RECORD
        rows = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    digest = next((line.split()[-1] for line in output.splitlines() if " digest " in f" {line}"), "")
    return {"kind": kind, "ranks": ranks, "rank": rank, "step": step, "bit": bit, "codes": codes, "digest": digest,
            "words": output.count("silent corruption"), "found": [[row["step"] - step, row["odd"]] for row in rows],
            "named_later": f"came out well this time. rank {rank} on" in output}


def verdict(row: dict[str, object], undisturbed: dict[int, str]) -> str:
    ranks, found = row["ranks"], row["found"]
    same = row["digest"] == undisturbed.get(ranks) and row["codes"] == [0]
    if row["kind"] == "none":
        return "healthy" if same and not row["words"] and not found else "a false word"
    if not found:
        return "rounded away: no state differed" if same else "missed"
    right = [row["rank"]] if ranks > 2 else [0, 1]
    steps = found[0][0]
    if len(found) == 1 and 0 < steps <= 6 and found[0][1] == right and same:
        return "found in 1 to 6 steps, the right rank named, the same weights in the end"
    return f"found, but: {row}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--log", type=Path, default=Path("flips.jsonl"))
    given = parser.parse_args()
    os.nice(19)
    rows = [json.loads(line) for line in given.log.read_text().splitlines()] if given.log.exists() else []
    with tempfile.TemporaryDirectory(prefix="flips-") as folder, given.log.open("a", encoding="utf-8") as log:
        forks = Forks(Path(folder))
        for number in range(len(rows), 2 * given.runs):
            rows.append(run(forks, random.Random(number), number))
            log.write(f"{json.dumps(rows[-1])}\n")
            log.flush()
        forks.close()
    undisturbed = {ranks: Counter(row["digest"] for row in rows if row["kind"] == "none" and row["ranks"] == ranks)
                   .most_common(1)[0][0] for ranks in {row["ranks"] for row in rows}}
    counts = Counter((row["kind"], row["ranks"], verdict(row, undisturbed)) for row in rows)
    for (kind, ranks, what), count in sorted(counts.items()):
        print(f"{count:4} {kind:9} {ranks} ranks  {what}")


if __name__ == "__main__":
    main()
