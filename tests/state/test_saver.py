"""A process that is about to end waits for the copy that it writes, not for an upload."""

import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rankup.state.saver import Options, Saver


def test_end_of_a_process_waits_for_the_copy_and_not_for_its_upload(tmp_path: Path) -> None:
    begun, may_end, saved = threading.Event(), threading.Event(), list[int]()

    def upload(path: Path, *, timeout_s: float) -> None:
        begun.set()
        assert may_end.wait(60)

    group: Any = SimpleNamespace(
        is_rank0=True, device=torch.device("cpu"), max=int, gather=lambda own: [own], log=logging.getLogger(), rank=0,
        watch=SimpleNamespace(enter=lambda *words, **more: None),
    )
    saver = Saver(
        group, tmp_path, Options(save="async", sharded=False), token="t", check_owner=lambda: None, saved=saved.append,
        second=None, upload=upload,
    )
    saver.save(7, b"{}", {"weights": torch.ones(3)})
    saver.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]
    assert begun.wait(60)
    assert saver.writing
    may_end.set()
    saver.look(wait=True)
    assert saved == [7]
