"""Requests and bytes that a checkpoint costs on S3, counted at a door before a real server of S3's protocol.

Run: python tests/bench/uploads.py --mib 100      (s3fs and moto are needed: make venv-tests)
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from rankup.places.place import Place
from rankup.state.reading import fetch_newest
from rankup.state.stored_run import StoredRun
from tests.rigs.checkpoints import save_checkpoint, training_state
from tests.rigs.object_store import BUCKET, S3, Door

RUN = "0123456789abcdef"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=100, help="size of the weights")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = S3(folder / "server.log")
        try:
            with server.door() as door:
                os.environ |= door.env
                measure(door, folder, given.mib)
        finally:
            server.close()


def measure(door: Door, folder: Path, mib: int) -> None:
    store = StoredRun(Place.open(f"s3://{BUCKET}/runs/one", warn=print, timeout_s=60), number=1)
    model = {"weight": torch.randn(mib * 2**18)}
    paths = [save_checkpoint(folder / "here", training_state(step), model, keep=9) for step in (1, 2, 3, 4)]
    size = sum(path.stat().st_size for path in paths[0].iterdir())
    print(f"a checkpoint of {size / 2**20:.1f} MiB in {len(list(paths[0].iterdir()))} files, keep 2")
    for path in paths:
        title = f"upload of {path.name}"
        count(door, title, lambda path=path: store.upload_copy(path, run=RUN, keep=2))  # type: ignore[misc]
    count(door, "fetch of the newest", lambda: fetch_newest(store, folder / "there", run=RUN))


def count(door: Door, title: str, work: Callable[[], object]) -> None:
    door.seen.clear()
    door.sent = 0
    work()
    kinds = Counter(request.method + (" part" if "partNumber" in request.query else "") for request in door.seen)
    sent = sum(request.size for request in door.seen)
    kinds_text = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    print(f"{title}: {len(door.seen)} requests ({kinds_text}), {sent / 2**20:.2f} MiB up, {door.sent / 2**20:.2f} down")


if __name__ == "__main__":
    main()
