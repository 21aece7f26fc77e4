"""An agent's ranks, without processes: which membership their ends belong to."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rankup.agent.ranks import Options, Ranks
from rankup.agent.script import Script
from rankup.env.node_env import Limits, NodeEnv


def test_late_end_of_a_rank_is_no_end_in_a_membership_that_its_node_only_waits_beside(tmp_path: Path) -> None:
    said: list[dict[str, Any]] = []

    def say(kind: str, **values: Any) -> bool:
        said.append({"is": kind, **values})
        return True

    async def scene() -> None:
        (tmp_path / "job.py").write_text("import rankup\n")
        options = Options(
            node=NodeEnv(num_nodes=2, limits=Limits(1, 2)), script=Script.find([str(tmp_path / "job.py")]),
            run_dir=tmp_path,
        )
        ranks = Ranks(options, say=say, hear_stop=print, begin=asyncio.create_task, finish=print)
        ranks.server = SimpleNamespace(start_rank=lambda *words, **more: None)  # type: ignore[assignment]
        commit = {"why": "", "again": False, "change": "", "ip": "127.0.0.1", "job": "job", "port": 1, "store": False}
        ranks.start({**commit, "n": 1, "restarts": 0, "basis": {"used": ["other", "mine"]}}, token="mine")
        ranks.start({**commit, "n": 3, "restarts": 2, "basis": {"used": ["other"]}}, token="mine")
        ranks._ended(ranks.ranks[0], 171)

    asyncio.run(scene())
    (end,) = said
    assert (end["is"], end["n"], end["rank"], end["code"]) == ("end", 1, 1, 171)
