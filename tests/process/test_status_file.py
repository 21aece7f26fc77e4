"""Which attempt may write `status.json` of a run directory."""

from pathlib import Path

from rankup.env.rank_env import RankEnv, read_rank_env
from train.process.status import read_json
from train.process.status_file import StatusFile


class Lease:
    def __init__(self) -> None:
        self.ours = True

    def is_ours(self) -> bool:
        return self.ours


def launch() -> RankEnv:
    return read_rank_env({})


def attempt_in(run_dir: Path) -> str:
    return str(read_json(run_dir / "status.json")["attempt"])


def test_an_attempt_that_is_running_keeps_its_status(tmp_path: Path) -> None:
    first, second = StatusFile(tmp_path, launch()), StatusFile(tmp_path, launch())
    first.write_summary("running", [])
    second.write_summary("running", [])
    assert attempt_in(tmp_path) == first.attempt != second.attempt
    first.write_summary("finished", [])
    second.write_summary("running", [])
    assert attempt_in(tmp_path) == second.attempt


def test_the_owner_replaces_what_a_killed_attempt_left_and_stops_where_it_lost_the_run(tmp_path: Path) -> None:
    killed, owner, lease = StatusFile(tmp_path, launch()), StatusFile(tmp_path, launch()), Lease()
    killed.write_summary("running", [])
    owner.claim(lease)
    assert attempt_in(tmp_path) == owner.attempt
    lease.ours = False
    owner.write_summary("failed", [])
    assert read_json(tmp_path / "status.json")["state"] == "running"


def test_a_folder_of_its_own_is_written_without_asking(tmp_path: Path) -> None:
    StatusFile(tmp_path, launch()).write_summary("running", [])  # killed
    alone = StatusFile(tmp_path, launch(), shared=False)
    alone.write_summary("running", [])
    assert attempt_in(tmp_path) == alone.attempt
