"""Names at the Hugging Face hub: downloaded when asked for, once; otherwise nobody is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs import hf_sets, hub
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import result
from tests.rigs.photographs import write_photographs

NAME = "someone/rows"
TOKEN = "hf_this_is_the_token"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[hub.Hub]:
    write_photographs(tmp_path / "photographs", 12, width=60, height=50)
    rows = hf_sets.images_of(tmp_path / "photographs")
    other = {name: values[4:8] for name, values in rows.items()}  # the same file twice would be fetched once
    splits = hf_sets.image_set({"train": rows, "validation": other}, ("class0", "class1"))
    with hub.serve(NAME, hf_sets.save_parquet(splits, tmp_path / "rows")) as found:
        yield found


def test_name_is_downloaded_once_by_two_ranks_when_asked_for(forks: Forks, served: hub.Hub, tmp_path: Path) -> None:
    env = {"HF_ENDPOINT": served.address, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN,
           "RANKUP_CACHE": str(tmp_path / "cache")}
    words = ("train", "--image-size", "32", "--batch-size", "4", "--max-steps", "3", "--tensorboard=false",
             "--advice=false", "--run-dir", str(tmp_path / "runs"))
    here = forks.run(*words, "--name", "here", "--dataset", f"hf:{served.folder}", world_size=2, env=env)
    assert here[0] == [0, 0], here[1]
    named = (*words, "--name", "named", "--dataset", f"hf:{NAME}")
    unasked = forks.run(*named, env=env)
    assert unasked[0] == [2], unasked[1]
    assert "Nothing is downloaded unasked" in unasked[1]
    assert served.requests == []
    asked = forks.run(*named, "--hf-download", world_size=2, env=env)
    assert asked[0] == [0, 0], asked[1]
    assert [served.count(f"data/{split}-00000-of-00001.parquet") for split in ("train", "validation")] == [1, 1]
    assert served.authorizations == {f"Bearer {TOKEN}"}
    assert result(tmp_path / "runs" / "named")["digest"] == result(tmp_path / "runs" / "here")["digest"]
    served.requests.clear()
    again = forks.run(*named, "--fresh", env=env)
    assert again[0] == [0], again[1]
    assert served.requests == []
    refused = forks.run(*words, "--dataset", "hf:someone/else", "--hf-download", env=env)
    assert refused[0] == [2], refused[1]
    assert "someone/else cannot be downloaded from the Hugging Face hub" in refused[1]
    outputs = [here[1], unasked[1], asked[1], again[1], refused[1]]
    assert not any(TOKEN in output for output in outputs)
