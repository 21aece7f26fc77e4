"""How a run ended: ids of attempts, files that are whole or absent, and whose end the summary names."""

from pathlib import Path

from rankup.env.rank_env import RankEnv
from rankup.errors import FAULT, FINISHED, JOIN_FAILED, PEER_LOST, STOPPED, USER_MISTAKE
from train.process.status import End, attempt_of, job_of, new_attempt, read_json, state_of, write_json
from train.process.status_file import StatusFile


def status_file(run_dir: Path) -> StatusFile:
    return StatusFile(run_dir, RankEnv(world_size=3, attempt="a-1"))


def test_attempts_of_one_job_share_its_part_of_the_id() -> None:
    job, other = new_attempt(), new_attempt()
    assert job != other
    assert {job_of(attempt_of(job, restart)) for restart in range(3)} == {job_of(job)} == {job}
    assert attempt_of(job, 0) != attempt_of(job, 1)


def test_every_code_but_two_is_a_failure() -> None:
    assert (state_of(FINISHED), state_of(STOPPED)) == ("finished", "stopped")
    assert {state_of(code) for code in (FAULT, USER_MISTAKE, JOIN_FAILED, PEER_LOST, 137)} == {"failed"}


def test_end_of_a_rank_is_kept_for_its_attempt(tmp_path: Path) -> None:
    end = End(1, "node0", "failed", 171, "lost rank 0", 7, suspect=0)
    assert End.from_json(end.to_json()) == end
    status_file(tmp_path).write_end(end)
    written = read_json(tmp_path / "status" / "a-1" / "rank-1.json")
    assert (written["attempt"], written["code"], written["suspect"], written["step"]) == ("a-1", 171, 0, 7)


def test_summary_names_the_cause_and_not_the_ranks_that_lost_it(tmp_path: Path) -> None:
    ends = [
        End(2, "c", "stopped", 143, "", 3),
        End(0, "a", "failed", 171, "lost a peer", 3),
        End(1, "b", "failed", 2, "a mistake", 3),
    ]
    status_file(tmp_path).write_summary("failed", ends)
    summary = read_json(tmp_path / "status.json")
    assert (summary["attempt"], summary["code"], summary["why"]) == ("a-1", 2, "a mistake")
    assert list(summary["ranks"]) == ["0", "1", "2"]


def test_summary_of_a_run_that_has_just_begun_has_no_code(tmp_path: Path) -> None:
    status_file(tmp_path).write_summary("running", [])
    summary = read_json(tmp_path / "status.json")
    assert (summary["state"], summary["code"], summary["why"]) == ("running", None, "")


def test_json_that_is_half_there_reads_as_none(tmp_path: Path) -> None:
    assert read_json(tmp_path / "missing.json") is None
    (tmp_path / "half.json").write_text('{"a": 1')
    assert read_json(tmp_path / "half.json") is None
    write_json(tmp_path / "new" / "whole.json", {"a": 1})
    assert read_json(tmp_path / "new" / "whole.json") == {"a": 1}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["whole.json"]
