"""What the ends of ranks mean for the job."""

import pytest

from rankup.agent.ends import End, Ends
from rankup.errors import FAULT, FINISHED, PEER_LOST, STOPPED

RESET = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"


def ended(*codes: int | End, max_restarts: int = 3, restart_on: tuple[int, ...] = ()) -> Ends:
    """Ranks that ended in this order."""
    ends = Ends(len(codes), max_restarts, restart_on)
    for rank, code in enumerate(codes):
        ends.add(code if isinstance(code, End) else End(rank, "n", code))
    return ends


def test_first_bad_end_ends_the_membership_and_good_ones_only_together() -> None:
    ends = Ends(2, 3)
    assert not ends.add(End(0, "n", FINISHED))
    assert ends.add(End(1, "n", FINISHED))
    assert ends.all_finished
    assert ends.judge().code == FINISHED
    assert Ends(2, 3).add(End(0, "n", 1))


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([137, PEER_LOST], None),
        ([PEER_LOST, FAULT], FAULT),  # the rank that lost it ended first
        ([PEER_LOST, PEER_LOST], None),
        ([2, 2], 2),
        ([FINISHED, 139], None),  # in its last moment: all look at the run once more
        ([STOPPED, STOPPED], STOPPED),
        # A script's rank that lost its peer ends with 1 as any traceback does
        ([End(0, "n", 1, RESET), End(1, "n", 137, "SIGKILL")], None),
        ([End(0, "n", 1, RESET), End(1, "n", 1, RESET)], None),
        ([End(0, "n", 1, RESET), End(1, "n", 3, "ValueError: boom")], 3),
        # Told to leave, it says nothing
        ([End(0, "n", 1, "KeyboardInterrupt", told=True), 137], None),
        ([End(0, "n", 143, told=True), FAULT], FAULT),
    ],
)
def test_one_end_of_several_is_the_cause(codes: list[int | End], code: int | None) -> None:
    assert ended(*codes).judge().code == code


def test_cause_is_named_with_rank_host_and_reason() -> None:
    verdict = ended(End(0, "a", 1, RESET), End(1, "b", 3, "ValueError: boom")).judge()
    assert verdict.text == "rank 1 on b ended with 3 (ValueError: boom)"


def test_codes_that_the_user_names_are_worth_a_restart() -> None:
    assert ended(75, restart_on=(75,)).judge().code is None
    assert ended(75).judge().code == 75


def test_restarts_without_a_new_step_are_counted() -> None:
    ends = Ends(1, 2)
    found = []
    for step in (5, 5, 9, 9, 9):
        ends.add(End(0, "n", 137, step=step))
        found.append(ends.judge())
    assert [verdict.code for verdict in found] == [None, None, None, None, 137]
    assert [verdict.text.partition(", ")[2] for verdict in found[:4]] == [
        f"restarted ({vain} of 2 attempts without progress)" for vain in (0, 1, 0, 1)
    ]
    assert found[-1].text.endswith("gave up after 2 restarts without progress")
    assert ends.restarts == 4


def test_lost_agent_takes_its_ranks_with_it() -> None:
    ends = Ends(2, 3)
    ends.add(End(0, "a", PEER_LOST))
    ends.lose([1], "b", "its agent has ended")
    verdict = ends.judge()
    assert verdict.code is None
    assert verdict.text.startswith("rank 1 on b ended with 137 (its agent has ended), restarted (1 of 3")


@pytest.mark.parametrize("codes", [[STOPPED, FINISHED], [PEER_LOST, 137], [STOPPED, 1]])
def test_job_that_was_asked_to_stop_is_not_started_again(codes: list[int]) -> None:
    ends = ended(*codes)
    ends.stopped_by = "SIGTERM"
    assert ends.judge().code in (STOPPED, 1)
