"""The part of fetching that can hang, as a process of its own, so that it can be ended. fetch.py starts it.

    python -P download.py torchvision CLASS ATTRIBUTES FOLDER
    python -P download.py apt PACKAGE PLACE FOLDER
    python -P download.py hub NAME CONFIGURATION

The first lets torchvision.datasets.CLASS download into the folder, after setting the class attributes in a JSON object.
The second unpacks PLACE of a Debian package there, without root. The third lets `datasets` put a data set of the
Hugging Face hub into its cache. On failure the last line that it prints is the reason, and it exits with 1.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import warnings
from pathlib import Path
from typing import NoReturn

SILENCE_S = 10.0  # give up when a server has sent nothing for this long
# What apt says when it has no lists of packages, as in a container image, or outdated ones.
NO_LISTS = ("Unable to locate package", "no installation candidate", "Can't find a source", "404")


def main(task: str, *arguments: str) -> None:
    """Run one task; exits with 1 if it fails."""
    # The parent holds the other end of our standard input, which closes when the parent ends, however it ends.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if task == "torchvision":
        _torchvision(*arguments)
    elif task == "hub":
        _hub(*arguments)
    else:
        _apt(*arguments)


def _torchvision(name: str, attributes: str, folder: str) -> None:
    import torchvision

    # torchvision opens its connections without a timeout. This one holds for each read from them.
    socket.setdefaulttimeout(SILENCE_S)
    # numpy >= 2.4 warns because CIFAR's pickles spell a dtype in numbers.
    warnings.simplefilter("ignore")
    dataset = getattr(torchvision.datasets, name)
    for attribute, value in json.loads(attributes).items():
        setattr(dataset, attribute, value)
    try:
        dataset(root=folder, download=True)
    except (RuntimeError, urllib.error.URLError, OSError, EOFError, ValueError) as error:
        _fail(f"{error}")


def _hub(name: str, configuration: str) -> None:
    # They would report to the hub what is used here. Read when the packages are imported.
    os.environ |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_UPDATE_DOWNLOAD_COUNTS": "0"}
    import datasets

    datasets.disable_progress_bars()
    try:
        datasets.load_dataset(name, configuration or None)
    except Exception as error:  # of many types: no network, no such name, no access, no such configuration, no room
        _fail(f"{error}" or type(error).__name__)


def _apt(package: str, place: str, folder: str) -> None:
    root = Path(folder)
    # As root, apt switches to a user who may not write here, unless this option keeps it from doing so.
    quick = ["-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=0"]
    quick += [part for kind in ("http", "https") for part in ("-o", f"Acquire::{kind}::Timeout={SILENCE_S:.0f}")]
    failure = _call(["apt-get", *quick, "download", package], root)
    if failure and any(symptom in failure for symptom in NO_LISTS):
        # Fetch the lists into a folder of our own, which needs no root.
        for name in ("lists/partial", "cache/archives/partial"):
            (root / name).mkdir(parents=True)
        own = ["-o", f"Dir::State::Lists={root}/lists", "-o", f"Dir::Cache={root}/cache"]
        unlisted = _call(["apt-get", *own, *quick, "update"], root)
        # Some of the lists may be enough, so try even if others could not be fetched.
        failure = _call(["apt-get", *own, *quick, "download", package], root)
        failure = failure and (unlisted or failure)
    if failure:
        _fail(failure)
    archives = list(root.glob("*.deb"))
    if len(archives) != 1:
        _fail(f"apt-get download {package} left {len(archives)} packages")
    if failure := _call(["dpkg", "-x", str(archives[0]), str(root / "unpacked")], root):
        _fail(failure)
    found = root / "unpacked" / place
    if not found.is_dir():
        _fail(f"the package {package} holds no {place}")
    shutil.move(found, root / "found")


def _call(command: list[str], folder: Path) -> str | None:
    """Run a command in the folder; None if it worked, otherwise its last error messages."""
    done = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", env={**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}, check=False,
    )
    if done.returncode == 0:
        return None
    complaints = [line for line in done.stdout.splitlines() if line.startswith(("E:", "Err:", "dpkg"))]
    return f"{' '.join(command[:1])}: {' '.join(complaints[-2:]) or done.stdout[-200:]}"


def size_of(folder: Path) -> int:
    """Bytes in all files below a folder, even while files appear and vanish."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            # apt renames its partial files.
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total


def _end_with_parent() -> None:
    # Not sys.stdin: the interpreter aborts at its end if a thread still holds the lock of that buffer.
    os.read(0, 1)
    # This process leads a group of its own: apt-get and its children end with it.
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _fail(reason: str) -> NoReturn:
    print(" ".join(reason.split()), flush=True)
    sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
