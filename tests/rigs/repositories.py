"""Three repositories of users who have only the wheel of rankup, and an index that the build of an image reaches.

Each script prints a digest of its weights and a word from a package that only its own list of packages names.
"""

import hashlib
import http.server
import subprocess
import sys
import threading
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.rigs.jobs import environment

MODEL = """
def digest(model):
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()[:16]
"""
# One process on one device, which knows nothing of ranks
ONE_GPU = f"""
import argparse, hashlib, pathlib, time
import torch
import extra
{MODEL}
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--data")
lr, data = (given := parser.parse_args()).lr, given.data
torch.set_num_threads(1)
torch.manual_seed(0)
scale = float(pathlib.Path(data, "scale.txt").read_text())
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
for step in range(60):
    optimizer.zero_grad()
    (scale * model(torch.randn(16, 8))).square().mean().backward()
    optimizer.step()
    time.sleep(0.05)
    print("step", step, flush=True)
torch.save(model.state_dict(), "runs/model.pt")
print("digest", digest(model), extra.WORD, flush=True)
"""
# A DDP script, as in PyTorch's tutorials
DDP = f"""
import argparse, hashlib, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import extra
{MODEL}
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=parser.parse_args().lr)
    torch.manual_seed(dist.get_rank())
    for step in range(60):
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        time.sleep(0.05)
        if dist.get_rank() == 0:
            print("step", step, flush=True)
    if dist.get_rank() == 0:
        print("digest", digest(model.module), extra.WORD, flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""
# A loop of one's own with rankup.init: a killed rank costs no finished step
OWN_LOOP = f"""
import hashlib, sys, time
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
import rankup
from ring import WORD
{MODEL}
job = rankup.init()
torch.set_num_threads(1)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
job.track(model=model, optimizer=optimizer)
points = torch.randn(480, 8, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(points), batch_size=16, shuffle=True)
for epoch in job.epochs(2):
    for (x,) in job.batches(loader):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        time.sleep(0.05)
        with job.step(loss=loss):
            optimizer.step()
        if job.is_main:
            print("step", job.step_number, flush=True)
job.finish()
if job.is_main:
    print("digest", digest(model.module), WORD, flush=True)
"""


@dataclass(frozen=True)
class Repository:
    """`script`: the script and its words. `options`: of `rankup add`. `nodes`: their number."""

    folder: Path
    script: str
    options: str = ""
    nodes: int = 2


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def one_gpu(folder: Path, index: str) -> Repository:
    """A script for one process, requirements.txt, and a folder of data."""
    write(folder, {"train.py": ONE_GPU, "requirements.txt": "torch\nextra\n", "points/scale.txt": "1.5\n"})
    return Repository(folder, "train.py --lr 0.1 --data points", "--nodes 1 --data points", nodes=1)


def package(folder: Path, index: str) -> Repository:
    """A package that is started with -m, and uv.lock."""
    project = '[project]\nname = "net"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = ["extra"]\n'
    write(folder, {"net/__init__.py": "", "net/train.py": DDP, "pyproject.toml": project})
    uv = [Path(sys.executable).with_name("uv"), "lock", "--quiet", "--no-index", "--find-links", index]
    subprocess.run(uv, cwd=folder, env=environment({}), check=True)
    return Repository(folder, "-m net.train --lr 0.1")


def own_loop(folder: Path, index: str) -> Repository:
    """A project with a package in src/ that pip installs, and a loop with rankup.init."""
    project = (
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "ring"\nversion = "1"\ndependencies = ["torch", "extra"]\n'
    )
    package = "from extra import WORD as WORD\n"
    write(folder, {"src/ring/__init__.py": package, "scripts/fit.py": OWN_LOOP, "pyproject.toml": project})
    return Repository(folder, "scripts/fit.py 0.1")


# The index ------------------------------------------------------------------------------------------------------------


@contextmanager
def index(folder: Path) -> Iterator[str]:
    """Serve wheels of uv, setuptools, and `extra`, which this function makes, on this machine. Yields the address."""
    record = "extra-1-py3-none-any.whl"
    with zipfile.ZipFile(folder / record, "w") as wheel:
        about = "extra-1.dist-info"
        files = {
            "extra.py": 'WORD = "extra-word"\n',
            f"{about}/METADATA": "Metadata-Version: 2.1\nName: extra\nVersion: 1\n",
            f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        for name, text in files.items():
            wheel.writestr(name, text)
        listed = "".join(f"{name},sha256={hash_of(text)},{len(text)}\n" for name, text in files.items())
        wheel.writestr(f"{about}/RECORD", f"{listed}{about}/RECORD,,\n")
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    subprocess.run([*download, "uv", "setuptools"], check=True, env=environment({"PYTHONWARNINGS": ""}))
    handler = partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


def hash_of(text: str) -> str:
    return urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Print no line for each request."""
