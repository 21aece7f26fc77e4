"""What one pass of a loop hands to the next is read in the script's code."""

import ast
import gc
import textwrap
import weakref
from pathlib import Path

import pytest
import torch

from rankup.loop.script import Accesses, Scope, around, handed_on, in_library, scopes


class Job:
    step_number, epoch = 3, 1


@pytest.mark.parametrize(("body", "names"), [
    ("best = min(best, loss)", ["best"]),
    ("total += loss", ["total"]),
    ("if loss < best: best = loss", ["best"]),
    ("self.steps += 1", ["self.steps"]),
    ("ema[k] = 0.9 * ema[k] + loss", ["ema[k]"]),
    ("mean = loss if mean is None else 0.9 * mean + loss", ["mean"]),
    ("a, b = b, a", ["b", "a"]),
    ("for part in x:\n    total += part", ["total"]),
    ("names = [n + shift for n in names]; shift = 1", ["names", "shift"]),
    ("while (left := left - 1) > 0: pass", ["left"]),
    ("with lock(held) as held: pass", ["held"]),
    ("loss = f(x); loss = loss + 1", []),
    ("total = 0\nfor part in x:\n    total += part", []),
    ("group = find(); group['lr'] *= 0.9; group.lr = group.lr / 2", []),
    ("for group in groups: group['lr'] *= 0.9", []),
    ("names = [n for n in x]; n = 1", []),
    ("losses.append(loss); seen[loss] = 1; print(best)", []),
    ("def late(): return later\nlater = 1", []),
    ("key = lambda: later\nlater = 1", []),
    ("took = time.time() - began; began = time.time()", []),
    ("now = time.time(); print(now - began); began = now", []),
    ("get(x).count += 1", []),
])
def test_loop_hands_on_what_it_reads_first_and_assigns(body: str, names: list[str]) -> None:
    assert Accesses(*ast.parse(body).body).handed_on() == names


SCRIPT = """
def train(job, loader, state):
    best = BEST
    for epoch in job.epochs(3):
        total = 0.0
        for i, x in enumerate(job.batches(loader)):
            for part in x:
                parts += part
                step()
            total += x.mean()
        best = max(best, total)
    while True:
        after += 1
"""


@pytest.mark.parametrize(("begin", "line", "outer", "inner", "names"), [
    ("0.0", 9, True, True, ["parts", "best", "total"]),
    ("0.0", 9, True, False, ["parts", "best"]),
    ("0.0", 9, False, True, ["parts", "total"]),
    ("0.0", 9, False, False, []),
    ("state['best']", 9, True, True, ["parts", "total"]),
    ("job.step_number", 9, True, True, ["parts", "total"]),
    ("0.0", 13, True, True, ["after"]),
])
def test_variables_of_the_loops_that_resumed_in_the_middle_are_named(
    begin: str, line: int, outer: bool, inner: bool, names: list[str], tmp_path: Path
) -> None:
    file, state = tmp_path / "script.py", {"best": 0.0}
    file.write_text(SCRIPT.replace("BEST", begin))
    scope = Scope({"job": Job(), "state": state}, {}, str(file), line)
    assert handed_on([scope], lambda value: value is state, outer=outer, inner=inner) == names
    assert handed_on([scope._replace(file="<none>")], lambda value: False, outer=True, inner=True) == []


TRAINER = """
class Trainer:
    def run(self):
        for epoch in self.job.epochs(3):
            self.epoch()
    def epoch(self):
        self.mean = 0.0
        for x in self.job.batches(self.loader):
            self.mean += x
            self.step(x)
    def step(self, x):
        self.steps += 1
        count += 1
"""


@pytest.mark.parametrize(("outer", "inner", "names"), [
    (True, True, ["self.mean", "self.steps"]), (True, False, ["self.steps"]), (False, False, []),
])
def test_attributes_that_functions_called_in_the_loop_change_are_named(
    outer: bool, inner: bool, names: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "script.py"
    file.write_text(TRAINER)
    scopes = [Scope({}, {}, str(file), line) for line in (5, 10, 12)]
    assert handed_on(scopes, lambda value: False, outer=outer, inner=inner) == names


@pytest.mark.parametrize(("head", "names"), [
    ("i, x in enumerate(job.batches(loader))", ["i"]),
    ("i, (x, y) in tqdm(enumerate(job.batches(loader)), total=3)", ["i"]),
    ("i, x in enumerate(job.batches(loader), job.step_number)", []),
    ("i, x in enumerate(others)", []),
    ("_, x in enumerate(job.batches(loader))", []),
])
def test_index_of_enumerate_that_the_loop_reads_is_named(head: str, names: list[str], tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(f"for {head}:\n    print(i, x)\n")
    assert handed_on([Scope({}, {}, str(file), 2)], lambda value: False, outer=True, inner=True) == names


def test_loops_end_at_the_function_that_is_called_in_them() -> None:
    tree = ast.parse(textwrap.dedent("""
        for a in x:
            def inner():
                for b in x:
                    pass
            pass
        else:
            pass
    """))
    found = [[ast.unparse(node).splitlines()[0] for node in around(tree, line)] for line in (5, 6, 8)]
    assert found == [["def inner():", "for b in x:"], ["for a in x:"], []]


def test_look_at_variables_keeps_none_of_them_alive() -> None:
    def loop() -> None:
        loss = torch.ones(1, requires_grad=True).sum()
        assert any(each.variables.get("loss") is loss for each in scopes())
        reference = weakref.ref(loss)
        del loss
        gc.collect()
        assert reference() is None

    def held(given: int) -> int:
        kept = locals()  # until Python 3.12 the same dict as the frame's
        scopes()
        return kept["given"]

    loop()
    assert held(1) == 1


def test_code_of_libraries_is_no_script() -> None:
    assert all(map(in_library, (torch.__file__, ast.__file__, scopes.__code__.co_filename, "<frozen runpy>", None)))
    assert not any(map(in_library, (__file__, "<stdin>", "/home/me/train.py")))
