"""Runs inside the image, which has no tests: `python inside_image.py FUNCTION` prints the function's result as JSON.

test_compose_image.py mounts this file, and compares the output."""

import csv
import json
import os
import shutil
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = Path(find_spec("torch").origin).parents[1]  # type: ignore[union-attr,arg-type]


def recorded() -> set[str]:
    """Return the files of all wheels, relative to site-packages, without the bytecode that pip compiles."""
    names = set()
    for record in PACKAGES.glob("*.dist-info/RECORD"):
        with record.open() as lines:
            names |= {os.path.normpath(name) for name, _, size in csv.reader(lines) if size}
    return names


def contents() -> dict[str, Any]:
    """Return what the image holds beyond the wheels, in MB, and what it should not hold."""
    wheels = recorded()
    everything, stray = 0, []
    for folder, folders, files in os.walk("/"):
        folders[:] = [name for name in folders if os.path.join(folder, name) not in ("/proc", "/sys", "/dev")]
        for name in files:
            path = os.path.join(folder, name)
            about = os.lstat(path)
            everything += about.st_size
            # The base image has Python's own wheel of pip; an empty file marks a place where the build mounted another
            if name.endswith((".whl", ".deb")) and not path.startswith("/usr/share/python-wheels/") and about.st_size:
                stray.append(path)
    stray += [tool for tool in ("gcc", "g++", "cc", "make", "git", "strip") if shutil.which(tool)]
    stray += [path for path in ("/run/secrets/ca", "/root/.cache/pip") if os.path.exists(path) and os.listdir(path)]
    stray += [path for path in ("/etc/pip.conf",) if os.path.exists(path) and os.path.getsize(path)]
    of_wheels = sum((PACKAGES / name).stat().st_size for name in wheels)
    return {"beyond_wheels_mb": (everything - of_wheels) // 10**6, "stray": stray}


def imports() -> dict[str, Any]:
    """Load each library to get its version, and call one operator of torchvision."""
    import torch
    import torch.profiler
    import torchvision
    from torch.utils.tensorboard import SummaryWriter

    warnings.simplefilter("ignore")
    with SummaryWriter("/tmp/board") as board:
        board.add_scalar("loss", 1.0, 1)
    boxes = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 2], [4, 4, 6, 6]])
    # Without a driver this is None only for a torch without CUDA
    return {
        "cuda": torch.version.cuda,
        "cuda_available": torch.cuda.is_available(),
        "nccl": torch.distributed.is_nccl_available() and torch.cuda.nccl.version(),
        "cudnn": torch.backends.cudnn.version(),
        "cusparselt": torch.backends.cusparselt.version(),
        "nms": torchvision.ops.nms(boxes, torch.tensor([0.9, 0.8, 0.7]), 0.5).tolist(),
        "board": len(list(Path("/tmp/board").iterdir())),
    }


if __name__ == "__main__":
    print(json.dumps({f.__name__: f for f in (contents, imports)}[sys.argv[1]]()))
