"""Breaks the meeting on purpose in twenty places, one at a time, and lets the simulator look for each fault.

    python -m tests.agent.mutants             # all; --most 5000 schedules each
    python -m tests.agent.mutants 3 7         # these

Each line says after which seed the fault was found. A fault that is not found is a promise that nobody tests."""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = [  # what it breaks, the file, the text, and what replaces it
    ("half of the voters count as a majority", "votes", "for token in voters) > len(voters)",
     "for token in voters) >= len(voters)"),
    ("either half may go on without a claim", "votes", "(present[:1] == list(voters[:1]) or shared)", "True"),
    ("spares may go on without a node that trained", "votes",
     "basis.left or any(token in here for token in basis.used)", "True"),
    ("earlier voters are not asked", "votes", "return [(self.n, self.voters), *self.before]",
     "return [(self.n, self.voters)]"),
    ("a proposal is newer than a commit with a smaller number", "votes",
     "return self.follows, self.n, self.v, self.by", "return 0, self.n, self.v, self.by"),
    ("a proposal forgets the voters before it", "forming", "before=tuple(self.basis.electorates)", "before=()"),
    ("both halves may follow the same membership", "forming", "if self.rules.shared and (unowned", "if 0 and (unowned"),
    ("a claim that another node has counts", "forming", "        if ok:\n", "        if True:\n"),
    ("a newer basis is never asked for", "leading", "not self.running and self._is_news(age)", "False"),
    ("a first proposal lets others lead", "meeting", "return self.basis if self.basis.follows else Basis()",
     "return self.basis"),
    ("a stop is confirmed that a rank has passed", "votes", "if furthest < self.step:", "if furthest <= self.step:"),
    ("a stop is confirmed before all have answered", "votes", "len(self._answers) < len(self.members)",
     "len(self._answers) < 1"),
    ("a commit does not wait for the spares", "forming",
     "self._late |= dict.fromkeys(seat for seat in self.seats.values() if not seat.leaves)", "pass"),
    ("no leader gives way to another", "leading",
     "return newer and same_job(other[\"job\"], own[\"job\"])", "return False"),
    ("an answer to an earlier proposal counts", "forming", "message[\"n\"] != self._proposed or seat not in",
     "seat not in"),
    ("a lost member does not void a proposal", "leading", "        if not self.running:\n            self._void()\n",
     "        if not self.running:\n            pass\n"),
    ("a silent leader is never noticed", "meeting", "if quiet_s > silent_s or is_over:", "if is_over:"),
    ("a new leader counts anew", "leading", "self.membership = max(self.membership, age[1])",
     "self.membership = self.membership"),
    ("a leader that knows less is followed", "meeting", "and said[\"formed\"] >= known[\"formed\"])", ")"),
    ("ranks keep running when their leader is gone", "meeting",
     "self._out.append(Hear({\"is\": \"gone\", \"why\": why, **more}))", "pass"),
]


def look_for(number: int, *, most: int, first: int) -> str:
    """Return the first seed that fails, or ""."""
    what, name, old, new = MUTANTS[number]
    with tempfile.TemporaryDirectory() as folder:
        for part in ("rankup", "tests/agent", "tests/__init__.py"):
            source, target = ROOT / part, Path(folder) / part
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        path = Path(folder) / f"rankup/agent/{name}.py"
        text = path.read_text()
        assert text.count(old) == 1, f"{what}: the text is {text.count(old)} times in {name}.py"
        path.write_text(text.replace(old, new))
        line = [sys.executable, "-m", "tests.agent.simulator", f"--first={first}", f"--count={most}", "--stop"]
        env = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, check=False)
        found = [each for each in done.stdout.splitlines() if each.startswith("seed ")]
        return found[0][:150] if found else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", type=int, nargs="*")
    parser.add_argument("--most", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    numbers = given.numbers or range(1, len(MUTANTS) + 1)
    missed = 0
    for number in numbers:
        found = look_for(number - 1, most=given.most, first=given.first)
        missed += not found
        print(f"{number:2} {MUTANTS[number - 1][0]}: {found or 'NOT FOUND'}", flush=True)
    print(f"{len(numbers) - missed} of {len(numbers)} found")


if __name__ == "__main__":
    main()
