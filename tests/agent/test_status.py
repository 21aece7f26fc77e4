"""What the files say of a run: whose end the summary names, and which attempt may write it."""

from pathlib import Path

from rankup.agent.ends import End, state_of
from rankup.agent.status import StatusFile, attempt_of, job_of, new_job, write_end
from rankup.env.rank_env import RankEnv, read_rank_env
from rankup.errors import FAULT, FINISHED, JOIN_FAILED, PEER_LOST, STOPPED, USER_MISTAKE
from rankup.places.files import read_json, write_json


def of_attempt(run_dir: Path) -> StatusFile:
    return StatusFile(run_dir, RankEnv(world_size=3, attempt="a-1"))


def test_attempts_of_one_job_share_its_part_of_the_id() -> None:
    job, other = new_job(), new_job()
    assert job != other
    assert {job_of(attempt_of(job, restart)) for restart in range(3)} == {job_of(job)} == {job}
    assert attempt_of(job, 0) != attempt_of(job, 1)


def test_every_code_but_two_is_a_failure() -> None:
    assert (state_of(FINISHED), state_of(STOPPED)) == ("finished", "stopped")
    assert {state_of(code) for code in (FAULT, USER_MISTAKE, JOIN_FAILED, PEER_LOST, 137)} == {"failed"}


def test_end_of_a_rank_is_kept_for_its_attempt(tmp_path: Path) -> None:
    write_end(tmp_path, "a-1", End(1, "node0", 171, "lost rank 0", 7, suspect=0))
    assert read_json(tmp_path / "status" / "a-1" / "rank-1.json") == {
        "attempt": "a-1", "rank": 1, "host": "node0", "state": "failed", "code": 171, "why": "lost rank 0", "step": 7,
        "suspect": 0,
    }


def test_summary_names_the_cause_and_not_the_ranks_that_lost_it(tmp_path: Path) -> None:
    ends = [End(2, "c", 143, "", 3), End(0, "a", 171, "lost a peer", 3), End(1, "b", 2, "a mistake", 3)]
    of_attempt(tmp_path).write_summary(ends)
    summary = read_json(tmp_path / "status.json")
    assert (summary["attempt"], summary["state"], summary["code"]) == ("a-1", "failed", 2)
    assert summary["why"] == "a mistake"
    assert list(summary["ranks"]) == ["0", "1", "2"]


def test_summary_of_a_run_that_has_just_begun_has_no_code(tmp_path: Path) -> None:
    of_attempt(tmp_path).write_summary([])
    summary = read_json(tmp_path / "status.json")
    assert (summary["state"], summary["code"], summary["why"]) == ("running", None, "")


def test_json_that_is_half_there_reads_as_none(tmp_path: Path) -> None:
    assert read_json(tmp_path / "missing.json") is None
    (tmp_path / "half.json").write_text('{"a": 1')
    assert read_json(tmp_path / "half.json") is None
    write_json(tmp_path / "new" / "whole.json", {"a": 1})
    assert read_json(tmp_path / "new" / "whole.json") == {"a": 1}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["whole.json"]


# Which attempt may write ----------------------------------------------------------------------------------------------


class Lease:
    def __init__(self) -> None:
        self.ours = True

    def is_ours(self) -> bool:
        return self.ours


def status_file(run_dir: Path, *, shared: bool = True) -> StatusFile:
    return StatusFile(run_dir, read_rank_env({}), shared=shared)


def attempt_in(run_dir: Path) -> str:
    return str(read_json(run_dir / "status.json")["attempt"])


def test_an_attempt_that_is_running_keeps_its_status(tmp_path: Path) -> None:
    first, second = status_file(tmp_path), status_file(tmp_path)
    first.write_summary([])
    second.write_summary([])
    assert attempt_in(tmp_path) == first.attempt != second.attempt
    first.write_summary([End(0, "a", FINISHED)])
    second.write_summary([])
    assert attempt_in(tmp_path) == second.attempt


def test_the_owner_replaces_what_a_killed_attempt_left_and_stops_where_it_lost_the_run(tmp_path: Path) -> None:
    killed, owner, lease = status_file(tmp_path), status_file(tmp_path), Lease()
    killed.write_summary([])
    owner.claim(lease)
    assert attempt_in(tmp_path) == owner.attempt
    lease.ours = False
    owner.write_summary([End(0, "a", FAULT)])
    assert read_json(tmp_path / "status.json")["state"] == "running"


def test_a_folder_of_its_own_is_written_without_asking(tmp_path: Path) -> None:
    status_file(tmp_path).write_summary([])  # killed
    alone = status_file(tmp_path, shared=False)
    alone.write_summary([])
    assert attempt_in(tmp_path) == alone.attempt
