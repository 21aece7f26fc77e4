"""What the ends of the ranks mean for the job, which end the summary names, and which attempt may write it."""

from pathlib import Path
from typing import Any

import pytest

from rankup.agent.ends import End, Ends, Verdict
from rankup.agent.status_files import StatusFile, write_end
from rankup.env.rank_env import RankEnv, read_rank_env
from rankup.errors import FAULT, FINISHED, PEER_LOST, STOPPED, PeerLost
from rankup.places.files import read_json
from rankup.timing import HEALTHY_S

RESET = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"


def ended(*codes: int | End) -> Ends:
    """Return the ends of ranks that ended in this order."""
    ends = Ends(len(codes), 3)
    for rank, code in enumerate(codes):
        ends.add(code if isinstance(code, End) else End(rank, "n", code))
    return ends


@pytest.mark.parametrize(("why", "lost"), [
    (RESET, True),
    ("RuntimeError: [pair.cc:553] Connection closed by peer [10.77.0.2]:19612.", True),
    ("RuntimeError: [/pytorch/gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting 1800000ms for recv", True),
    ("RuntimeError: Gloo connectFullMesh failed with [/pytorch/gloo/transport/tcp/pair.cc:144] no error", True),
    ("torch.distributed.DistNetworkError: Connection reset by peer", True),
    ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, remote process exited", True),
    ("horovod.common.exceptions.HorovodInternalError: Horovod has been shut down. ", True),
    ("torch.distributed.DistNetworkError: The server socket has failed to listen", False),
    # A script's own network errors: Python's, a client's of an object store, a tracker's
    ("ConnectionResetError: [Errno 104] Connection reset by peer", False),
    ("BrokenPipeError: [Errno 32] Broken pipe", False),
    ("requests.exceptions.ConnectionError: ('aborted', ConnectionResetError(104, 'Connection reset by peer'))", False),
    ("urllib3.exceptions.ProtocolError: ('Connection broken: ConnectionResetError(104, 'reset by peer')", False),
    ("RuntimeError: the upload to s3://bucket failed: Connection reset by peer", False),
    ("wandb.errors.CommError: Broken pipe", False),
    ("stderr: the store has closed: Socket closed", False),
])
def test_only_an_error_of_a_collective_is_the_loss_of_a_peer(why: str, lost: bool) -> None:
    assert End(0, "n", 1, why).explains is not lost
    ends = ended(End(0, "n", 1, RESET), End(1, "n", 1, why)).judge()
    assert (ends.code, ends.cause is None) == ((None, False) if lost else (1, True))


@pytest.mark.parametrize(("codes", "code"), [
    ([137, PEER_LOST], None),
    ([PEER_LOST, FAULT], FAULT),  # the rank that lost its peer ended first
    ([PEER_LOST, PEER_LOST], None),
    ([2, 2], 2),
    ([FINISHED, 139], None),  # it crashed at its very end, so the next attempt looks at the run once more
    ([STOPPED, STOPPED], STOPPED),
    # A script's rank that lost its peer ends with 1, as after any other traceback
    ([End(0, "n", 1, RESET), End(1, "n", 137, "SIGKILL")], None),
    ([End(0, "n", 1, RESET), End(1, "n", 1, RESET)], None),
    ([End(0, "n", 1, RESET), End(1, "n", 3, "ValueError: boom")], 3),
    ([FINISHED, End(1, "n", 1, RESET), End(2, "n", 143, told=True)], FAULT),  # rank 0 left while others exchanged
    ([FINISHED, End(1, "n", 1, RESET), End(2, "n", 137, "SIGKILL")], None),
    ([End(0, "n", 0, told=True), End(1, "n", 1, RESET)], None),
    ([End(0, "n", 1, RESET), FINISHED], None),
    # A rank that was told to leave says nothing about the cause
    ([End(0, "n", 1, "KeyboardInterrupt", told=True), 137], None),
    ([End(0, "n", 143, told=True), FAULT], FAULT),
    ([End(0, "n", FAULT), End(0, "n", 137, "its agent has ended")], FAULT),  # the second end of a rank does not count
])
def test_ends_of_all_ranks_give_one_code(codes: list[int | End], code: int | None) -> None:
    assert ended(*codes).judge().code == code


def test_cause_names_rank_host_and_reason_and_blames_no_rank_that_lost_it() -> None:
    verdict = ended(End(0, "a", 1, RESET), End(1, "b", 1, "ValueError: boom")).judge()
    assert verdict.text == "rank 1 on b ended with 1 (ValueError: boom)"
    verdict = ended(End(0, "a", PEER_LOST), End(1, "b", 137, "its agent has ended")).judge()
    assert verdict.code is None
    assert verdict.text.startswith("rank 1 on b ended with 137 (its agent has ended), restarted (1 of 3")
    assert [End(0, "a", code, suspect=1).blamed for code in (PEER_LOST, 137)] == [1, 0]


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


def lose_node(ends: Ends, *, after_s: float, next_size: int = 4, cause: int | None = None) -> Verdict:
    """Lose the second of two nodes with two ranks each. `cause`: the code with which rank 0 ended before."""
    ends.add(End(0, "a", 143 if cause is None else cause, told=cause is None))
    ends.add(End(1, "a", 143, told=True))
    ends.add_lost_node([End(2, "b", 137, "its agent has ended"), End(3, "b", 137)], after_s=after_s)
    verdict, ends.world_size = ends.judge(next_size=next_size), next_size
    return verdict


@pytest.mark.parametrize(("after_s", "elastic", "sizes", "codes"), [
    (HEALTHY_S, False, [6] * 6, [None] * 6),  # a node a day, for a month
    (HEALTHY_S / 2, False, [6] * 4, [None, None, None, 137]),  # whatever comes back fails again and again
    (1.0, False, [5, 4, 3, 2, 1], [None] * 5),  # spot nodes are taken away one by one
    (1.0, False, [5, 6, 5, 6], [None, None, None, 137]),  # they come back, and are lost again
    (1.0, True, [6] * 6, [None] * 6),  # a spare takes the place of each
])
def test_lost_node_of_a_healthy_unchanged_script_does_not_use_up_the_restarts(
    after_s: float, elastic: bool, sizes: list[int], codes: list[int | None]
) -> None:
    ends = Ends(6, 3, elastic=elastic)
    found = [lose_node(ends, after_s=after_s, next_size=size) for size in sizes]
    assert [verdict.code for verdict in found] == codes
    if after_s >= HEALTHY_S:
        assert "restarted (0 of 3 attempts without progress)" in found[-1].text


def test_rank_that_crashes_counts_even_if_its_crash_costs_a_node() -> None:
    ends = Ends(4, 3)
    assert [lose_node(ends, after_s=HEALTHY_S, cause=139).code for _ in range(4)] == [None, None, None, 139]


@pytest.mark.parametrize("codes", [[STOPPED, STOPPED], [STOPPED, PEER_LOST], [PEER_LOST, PEER_LOST]])
def test_stop_for_a_new_membership_is_no_restart_without_progress(codes: list[int]) -> None:
    """One rank may lose another that left before it."""
    ends = ended(*codes)
    assert ends.judge(resizing=True).code is None
    assert (ends.restarts, ends.without_progress) == (1, 0)


@pytest.mark.parametrize(("codes", "code"), [
    ([STOPPED, FINISHED], 143), ([PEER_LOST, 137], 143), ([STOPPED, 1], 1), ([], 143),
])
def test_stopped_job_is_not_restarted(codes: list[int], code: int) -> None:
    """Not even if its nodes are just changing."""
    for changing in (False, True):
        ends = ended(*codes)
        ends.stopped_by = "SIGTERM"
        assert ends.judge(resizing=changing).code == code


def test_end_of_a_rank_is_written_for_its_attempt(tmp_path: Path) -> None:
    write_end(tmp_path, "a-1", End(1, "node0", 171, "lost rank 0", 7, suspect=0))
    assert read_json(tmp_path / "status" / "a-1" / "rank-1.json") == {
        "attempt": "a-1", "rank": 1, "host": "node0", "state": "failed", "code": 171, "why": "lost rank 0", "step": 7,
        "suspect": 0, "told": False,
    }


def test_summary_names_the_cause_not_the_ranks_that_lost_it(tmp_path: Path) -> None:
    ends = [End(2, "c", 143, "", 3), End(0, "a", 171, "lost a peer", 3), End(1, "b", 2, "a mistake", 3)]
    StatusFile(tmp_path, RankEnv(world_size=3, attempt="a-1")).write_summary(ends)
    StatusFile(tmp_path, RankEnv(1, world_size=3, attempt="a-1")).write_summary(ends[:1])  # only rank 0 writes it
    summary = read_json(tmp_path / "status.json")
    assert (summary["attempt"], summary["state"], summary["code"]) == ("a-1", "failed", 2)
    assert summary["why"] == "a mistake"
    assert list(summary["ranks"]) == ["0", "1", "2"]


class Lease:
    def __init__(self) -> None:
        self.ours = True

    def check(self) -> None:
        if not self.ours:
            raise PeerLost("another attempt owns the run")


def status_file(run_dir: Path) -> StatusFile:
    return StatusFile(run_dir, read_rank_env({}))


def attempt_in(run_dir: Path) -> str:
    return str(read_json(run_dir / "status.json")["attempt"])


def test_status_of_a_running_attempt_is_not_overwritten(tmp_path: Path) -> None:
    first, second = status_file(tmp_path), status_file(tmp_path)
    (tmp_path / "status.json").write_text("[1]")  # a damaged file is overwritten
    (tmp_path / "lease.json").touch()
    first.write_summary([])
    second.write_summary([])
    assert attempt_in(tmp_path) == first.attempt != second.attempt
    first.write_summary([End(0, "a", FINISHED)])
    second.write_summary([])
    assert attempt_in(tmp_path) == second.attempt
    (tmp_path / "lease.json").unlink()
    alone = status_file(tmp_path)  # nobody owns the folder now, so anyone may write
    alone.write_summary([])
    assert attempt_in(tmp_path) == alone.attempt


def test_owner_replaces_a_killed_attempts_status_until_it_loses_the_run(tmp_path: Path) -> None:
    lease: Any = Lease()
    killed, owner = status_file(tmp_path), status_file(tmp_path)
    killed.write_summary([])
    owner.claim(lease)
    assert attempt_in(tmp_path) == owner.attempt
    lease.ours = False
    owner.write_summary([End(0, "a", FAULT)])
    assert read_json(tmp_path / "status.json")["state"] == "running"
