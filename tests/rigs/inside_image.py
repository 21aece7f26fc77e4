"""Runs inside the image, which has no tests: `python inside_image.py FUNCTION` prints what it returns as JSON.

test_compose_image.py mounts this file, and compares what it prints."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

PACKAGES = next(Path("/opt/venv/lib").glob("python3*/site-packages"))
# What docker/slim.sh removes
REMOVED = (
    "*.a", "*/tests/*", "torch/bin/protoc*", "triton/backends/nvidia/lib/cupti*", "triton/plugins/*.so*",
    "triton/instrumentation/*.so*", "nvidia/cu*/lib/libcusolverMg.so*", "nvidia/cu*/lib/libnvrtc*.alt.so*",
)


def recorded() -> set[str]:
    """The files of all wheels, relative to site-packages; not the bytecode that pip compiles."""
    names = set()
    for record in PACKAGES.glob("*.dist-info/RECORD"):
        with record.open() as lines:
            names |= {os.path.normpath(name) for name, _, size in csv.reader(lines) if size}
    return names


def contents() -> dict[str, Any]:
    """What the image holds beyond the wheels, in MB, and what it should not hold; which files of wheels are gone."""
    wheels = recorded()
    everything, stray = 0, []
    for folder, folders, files in os.walk("/"):
        folders[:] = [name for name in folders if os.path.join(folder, name) not in ("/proc", "/sys", "/dev")]
        for name in files:
            path = os.path.join(folder, name)
            about = os.lstat(path)
            everything += about.st_size
            # Python's own wheels of pip are the base's; an empty file is where the build mounted one
            if name.endswith((".whl", ".deb")) and not path.startswith("/usr/share/python-wheels/") and about.st_size:
                stray.append(path)
    stray += [tool for tool in ("gcc", "g++", "cc", "make", "pip", "git", "strip") if shutil.which(tool)]
    stray += [path for path in ("/run/secrets/ca", "/root/.cache/pip") if os.path.exists(path) and os.listdir(path)]
    stray += [path for path in ("/etc/pip.conf",) if os.path.exists(path) and os.path.getsize(path)]
    here = {name for name in wheels if (PACKAGES / name).exists()}
    gone = wheels - here
    return {
        "beyond_wheels_mb": (everything - sum((PACKAGES / name).stat().st_size for name in here)) // 10**6,
        "stray": stray + sorted(name for name in here if any(fnmatch(name, pattern) for pattern in REMOVED)),
        "lost": sorted(name for name in gone if not any(fnmatch(name, pattern) for pattern in REMOVED)),
    }


def libraries() -> dict[str, Any]:
    """Which libraries need a file that is neither in the system nor in any package, by the name of that file."""
    files = [path for path in PACKAGES.rglob("*.so*") if path.is_file() and re.search(r"\.so(\.\d+)*$", path.name)]
    # Some have no path to torch's libraries, as torchvision's: Python has imported torch before it loads them
    names = {path.name for path in files}
    missing: dict[str, list[str]] = {}
    for path in files:
        said = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
        for name in set(re.findall(r"(\S+) => not found", said)) - names:
            missing.setdefault(name, []).append(path.name)
    return {"looked_at": len(files), "missing": missing}


def imports() -> dict[str, Any]:
    """The versions that each library tells itself, so that it was loaded, and one operator of torchvision."""
    import torch
    import torch.profiler
    import torchvision
    from torch.utils.tensorboard import SummaryWriter

    warnings.simplefilter("ignore")
    with SummaryWriter("/tmp/board") as board:
        board.add_scalar("loss", 1.0, 1)
    boxes = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 2], [4, 4, 6, 6]])
    # Without a driver this is None on a torch without CUDA alone
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
    print(json.dumps({f.__name__: f for f in (contents, libraries, imports)}[sys.argv[1]]()))
