"""One rule decides which of several exit codes is the cause."""

import errno
import itertools
import os
from pathlib import Path

import pytest

from rankup.errors import UserError, disk_errors, root_cause, worth_restarting

CASES = [
    ([], 0),
    ([0, 0], 0),
    ([0, 143], 143),
    ([171, 1], 1),  # a fault is not worth a restart, whichever rank ended first
    ([137, 2, 1], 2),  # the first of two codes of the same weight
    ([171, 137], 137),
    ([139, 137], 139),
    ([143, 137], 137),
    ([170, 171], 170),
    ([171, 143], 143),  # this rank was stopped, and the others lost it
]


@pytest.mark.parametrize(("codes", "cause"), CASES)
def test_root_cause_of_several_codes_is_the_expected_one(codes: list[int], cause: int) -> None:
    assert root_cause(codes) == cause


def test_root_cause_is_one_of_the_codes_in_any_order() -> None:
    for codes in itertools.product([0, 1, 2, 137, 143, 170, 171], repeat=3):
        cause = root_cause(codes)
        assert cause in codes
        assert (cause == 0) == (set(codes) == {0}), "nothing that failed may end with 0"
        if 1 in codes or 2 in codes:
            assert cause in (1, 2)
        elif len(set(codes)) == 3:
            assert {root_cause(order) for order in itertools.permutations(codes)} == {cause}


def test_restart_is_worth_it_from_128_on_except_after_a_stop() -> None:
    assert [code for code in (0, 1, 2, 127, 128, 137, 143, 170, 171) if worth_restarting(code)] == [128, 137, 170, 171]


@pytest.mark.parametrize(("name", "code", "text"), [
    ("metrics.jsonl", errno.EISDIR, "metrics: /run/metrics.jsonl must be writable, got Is a directory. "),
    (".writing-x/model", errno.EIO, "metrics: /run must be writable, got Input/output error. "),
    ("metrics.jsonl", errno.ENOSPC, "metrics: /run has no space left. "),
    ("", errno.EACCES, "metrics: /run must be writable, got Permission denied. "),
])
def test_error_of_a_disk_names_the_file_that_the_user_knows(name: str, code: int, text: str) -> None:
    with pytest.raises(UserError) as error, disk_errors("metrics", Path("/run")):
        raise OSError(code, os.strerror(code), f"/run/{name}".rstrip("/"))
    assert str(error.value).startswith(text)
