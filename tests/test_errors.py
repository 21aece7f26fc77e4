"""Which exit code of several is the cause: one rule, asked by Python and by shell files."""

import itertools
import subprocess
import sys

import pytest

from rankup.errors import root_cause, worth_restarting
from tests.rigs.jobs import ROOT

CASES = [
    ([], "", 0),
    ([0, 0], "", 0),
    ([0, 143], "", 143),
    ([171, 1], "", 1),  # a fault is not worth a second try, whichever rank ended first
    ([137, 2, 1], "", 2),  # the first of those that count the same
    ([137, 2], "--stopped", 2),
    ([171, 137], "", 137),
    ([139, 137], "", 139),
    ([143, 137], "", 137),
    ([170, 171], "", 170),
    ([171, 143], "", 143),  # it was stopped alone, and the others lost it
    ([143, 171], "--rest-stopped", 171),  # it was stopped because another had failed
    ([143, 143], "--rest-stopped", 143),
    ([137, 171], "--stopped", 143),
    ([0, 0], "--stopped", 0),
]


@pytest.mark.parametrize(("codes", "flag", "cause"), CASES)
def test_root_cause_of_several_exit_codes(codes: list[int], flag: str, cause: int) -> None:
    assert root_cause(codes, stopped=flag == "--stopped", rest_stopped=flag == "--rest-stopped") == cause


def test_root_cause_is_one_of_the_codes_in_any_order() -> None:
    for codes in itertools.product([0, 1, 2, 137, 143, 170, 171], repeat=3):
        cause = root_cause(codes)
        assert cause in codes
        assert (cause == 0) == (set(codes) == {0}), "nothing that failed may end with 0"
        if 1 in codes or 2 in codes:
            assert cause in (1, 2)
        elif len(set(codes)) == 3:
            assert {root_cause(order) for order in itertools.permutations(codes)} == {cause}


@pytest.mark.parametrize(("codes", "flag", "cause"), CASES[-6:])
def test_root_cause_answers_shell_files(codes: list[int], flag: str, cause: int) -> None:
    words = [*flag.split(), *map(str, codes)]
    # Without the environment's packages: a cluster's node has none
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", "import runpy, sys; sys.path.insert(0, '.'); "
         "runpy.run_module('rankup.errors', run_name='__main__', alter_sys=True)", *words],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )
    assert (done.stdout, done.stderr) == (f"{cause}\n", "")


def test_restart_is_worth_it_from_128_on_but_not_after_a_stop() -> None:
    assert [code for code in (0, 1, 2, 127, 128, 137, 143, 170, 171) if worth_restarting(code)] == [128, 137, 170, 171]
