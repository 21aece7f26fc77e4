"""A user's own loop keeps the promises: its state has the same digest, whoever starts and whatever ends its ranks.

It has three ranks, because a sum of two numbers is the same in either order. The tests that resume from a copy hold the
rules of exactness: without the order of samples, the random state, types that JSON loses, or buffers as of the last
commit, each kill changes the digest. Only the kill at the end of an epoch tests the fixed order of DDP's buckets.
"""

import json
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from rankup import cli
from rankup.observe import stacks
from rankup.observe.status import look
from tests.promises.test_examples import STRUCK, Once
from tests.rigs.foreign_scripts import BE_SCRIPT, WARN
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import metrics

SCRIPT = Path(__file__).with_name("loop_script.py")
RANKS = 3


def by_hand(forks: Forks, folder: Path, *, code: int = 0, ranks: int = RANKS, die: str = "", **env: str) -> str:
    """Run ranks without a launcher, with the five variables set. Return what they print."""
    return forks.ends(STRUCK, SCRIPT, folder / "run", world_size=ranks, cwds=[folder] * ranks,
                      preload="tests.rigs.struck:by_fork", env={**env, "DIE": die}, code=code)


def ran(forks: Forks, folder: Path, text: str, *, ranks: int = 1, code: int = 0, **env: str) -> str:
    """Run a script of this text without a launcher. Return what its ranks print."""
    (folder / "script.py").write_text(text)
    return forks.ends(STRUCK, folder / "script.py", world_size=ranks, cwds=[folder] * ranks, env=env, code=code,
                      preload="tests.rigs.struck:by_fork")


def said(output: str, what: str = "digest") -> str:
    return next(line.partition(" ")[2] for line in output.splitlines() if line.startswith(f"{what} "))


@pytest.fixture
def undisturbed(once: Once, forks: Forks, tmp_path: Path) -> str:
    (tmp_path / "undisturbed").mkdir()
    return once("own-loop", lambda: said(by_hand(forks, tmp_path / "undisturbed")))


@pytest.mark.parametrize(("where", "prefetch"), [("1:13", 0), ("0:8", 0), ("2:24", 0), ("2:9", 2)])
def test_killed_rank_costs_no_finished_step_and_changes_no_bit(
    undisturbed: str, forks: Forks, tmp_path: Path, where: str, prefetch: int
) -> None:
    line = ("launch", f"--nproc={RANKS}", SCRIPT, tmp_path / "run")
    crash = where == "0:8"
    how = signal.SIGSEGV if crash else signal.SIGKILL
    env = {"DIE": f"{where}:{int(how)}", "COMPILE": where[0] if where == "1:13" else "", "PREFETCH": str(prefetch)}
    output = forks.ends(*line, cwds=[tmp_path], env=env)
    assert "no finished step was lost" in output
    assert ("Fatal Python error: Segmentation fault" in output) == crash  # faulthandler names the line of Python
    assert said(output) == undisturbed  # also if the killed rank had compiled its model
    assert f"steps: {tmp_path}/run/; rankup status {tmp_path}/run" in output
    # metrics.jsonl has these values although the loop ends before log_every_steps, 50
    assert [line["step"] for line in metrics(tmp_path / "run") if "train/loss" in line] == [10, 20]
    logs = {path.name: path.read_text() for path in (tmp_path / "run" / "logs").iterdir()}
    assert logs.keys() == {f"rank-{rank}.log" for rank in range(RANKS)}
    assert all("no finished step was lost" in text for text in logs.values())
    # The log has the script's own output, and rankup's lines only once
    assert [logs["rank-0.log"].count(line) for line in (f" r0 digest {undisturbed}\n", " finished after ")] == [1, 1]


def test_stopped_job_resumes_with_the_same_bits_under_torchrun(undisturbed: str, forks: Forks, tmp_path: Path) -> None:
    output = by_hand(forks, tmp_path, code=143, die=f"0:5:{int(signal.SIGTERM)}", PREFETCH="2")
    assert "The same command goes on from it" in output
    line = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", SCRIPT, tmp_path / "run")
    again = forks.ends(*line, env=WARN, cwds=[tmp_path], preload=BE_SCRIPT)
    assert "resumed from step-" in again
    assert "gives another batch" not in again  # what was fetched ahead does not count
    assert said(again) == undisturbed


def test_job_resumed_with_more_ranks_differs_only_by_the_order_of_sums(forks: Forks, tmp_path: Path) -> None:
    """The loop has no dropout and no batch norm here, because they depend on the number of ranks."""
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = by_hand(forks, tmp_path / "whole", ranks=2, PLAIN="1")
    by_hand(forks, tmp_path / "parts", ranks=2, code=143, die=f"1:9:{int(signal.SIGTERM)}", PLAIN="1")
    parts = by_hand(forks, tmp_path / "parts", PLAIN="1")
    assert "world size was 2, is 3" in parts
    assert said(parts) != said(whole)
    assert said(whole, "threads") == "lease reporter watch"  # rank 0's; TensorBoard adds one later
    weights = json.loads(said(whole, "weights"))
    assert json.loads(said(parts, "weights")) == pytest.approx(weights, rel=1e-4, abs=1e-6)
    # `rankup export` writes the copy as one file, with all types that this loop tracks
    assert cli.main(["export", "run", str(tmp_path / "all.pt"), "--run-dir", str(tmp_path / "whole")]) == 0
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert [value for name in ("body", "head") for each in found[name].values() for value in each.flatten()] == weights
    assert found["scheduler"]["milestones"] == {6: 2, 15: 1}
    assert found.keys() == {"body", "head", "sgd", "adam", "scheduler", "scaler", "best", "history", "passes"}
    assert cli.main(["export", str(tmp_path / "whole" / "run"), str(tmp_path / "x.pt"), "--item", "net"]) == 2


STATE_OF_ALL_KINDS = """
import hashlib, os, signal, time, torch, rankup
from torch import nn

class Master(torch.optim.Optimizer):  # keeps weights in float32 for parameters in bfloat16
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("master", p.float())
            state["master"] -= 0.01 * p.grad.float()
            p.copy_(state["master"])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = self.same = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)
    def forward(self, x):
        return self.last(self.norm(x))

job = rankup.init("runs/kinds", tensorboard=False)
net, low = Net(), nn.Parameter(torch.ones(4).bfloat16())
extra = {"prompts": [nn.Parameter(torch.zeros(()))], "mean": torch.zeros(4), "made": {}}
temperature, mean = extra["prompts"][0], extra["mean"]
sgd, master = torch.optim.SGD([*net.parameters(), temperature], lr=0.5), Master([low], {})
job.track(net=net, low={"low": low}, extra=extra, sgd=sgd, master=master)
for step in job.steps(12):
    x = torch.randn(8, 4)
    loss = net(x * low.float()).mul(temperature.exp()).logsumexp(1).mean() + extra["made"].get("bias", torch.zeros(()))
    sgd.zero_grad(), setattr(low, "grad", None)
    loss.backward()
    if step == 8 and "STOP" in os.environ:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)  # the last commit is saved, although the pass above has changed buffers since
    with job.step():
        sgd.step(), master.step()
        mean.lerp_(x.mean(0), 0.1)
        if step == 3:
            extra["made"]["bias"] = nn.Parameter(torch.zeros(()))
        elif step > 3:
            extra["made"]["bias"].data -= 0.1 * extra["made"]["bias"].grad
            extra["made"]["bias"].grad = None
job.finish()
values = [*net.state_dict().values(), low, temperature, mean, extra["made"]["bias"]]
print("digest", hashlib.sha256(b"".join(each.detach().double().numpy().tobytes() for each in values)).hexdigest())
"""


def test_state_in_dicts_and_of_low_precision_resumes_with_the_same_bits(forks: Forks, tmp_path: Path) -> None:
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    whole = said(ran(forks, tmp_path / "whole", STATE_OF_ALL_KINDS))
    ran(forks, tmp_path / "stopped", STATE_OF_ALL_KINDS, code=143, STOP="1")
    assert said(ran(forks, tmp_path / "stopped", STATE_OF_ALL_KINDS)) == whole


def test_loop_that_tracks_nothing_says_so_when_it_stops(forks: Forks, tmp_path: Path) -> None:
    """The loop also reads two loaders at once, each with its own weight."""
    output = by_hand(forks, tmp_path, code=143, die=f"2:5:{int(signal.SIGTERM)}", UNTRACKED="1")
    assert "nothing is tracked, so nothing was saved" in output


def test_loop_that_tracks_nothing_stops_while_it_waits_for_data(forks: Forks, tmp_path: Path) -> None:
    text = (
        "import os, signal, time, rankup\nclass Slow(list):\n    def __iter__(self):\n        yield 1\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n        time.sleep(600)\n"
        "job = rankup.init('run')\nfor _ in job.batches(Slow()):\n    with job.step():\n        pass\n"
    )
    output = ran(forks, tmp_path, text, code=143)
    assert "stopped at step 1, nothing is tracked" in output


def test_rank_0_saves_when_others_leave_before_the_agreed_step(
    forks: Forks, tmp_path: Path
) -> None:
    """A copy in memory is not enough: the job may resume on other machines. The script also changes its folder."""
    text = (
        "import os, signal, time, rankup\njob, count = rankup.init('run'), {'n': 0}\njob.track(count=count)\n"
        "os.chdir('..')\nfor step in job.steps(10**6):\n    with job.step():\n        count['n'] += 1\n"
        "    if step == 3 and job.rank:\n        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(600 if job.rank and step + 1 == job.group.record.confirmed else 0.01)\n"
    )
    ran(forks, tmp_path, text, ranks=2, code=143)
    assert [*(tmp_path / "run" / "checkpoints").glob("step-*")]


def test_state_that_differs_among_ranks_is_reported_once(forks: Forks, tmp_path: Path) -> None:
    text = (
        "import torch, rankup\njob, own, same = rankup.init('run'), {'n': 0}, {'n': 0}\n"
        "norm = torch.nn.BatchNorm1d(1)\nnorm.register_buffer('x', torch.eye(2).to_sparse(), persistent=False)\n"
        "job.track(norm=norm, own=own, same=same)\nfor _ in job.steps(30):\n    norm(torch.ones(2, 1) * job.rank)\n"
        "    with job.step():\n        own['n'] += job.rank\n        same['n'] += 1\njob.finish()\n"
    )
    output = ran(forks, tmp_path, text, ranks=2)
    assert re.findall("the ranks differ in (.*), and a resume", output) == ["own and the buffers of norm"]


@pytest.mark.parametrize(("line", "what"), [
    ("job.track(own=[job.rank])", "track: own"),
    ("from torch import nn\njob.track(net=nn.PReLU(init=0.1 * job.rank))", "track: net"),
    ("next(iter(job.batches(DataLoader(range(9), sampler=[job.rank] * 9))))", "batches: the order of the samples"),
])
def test_ranks_that_must_be_equal_and_differ_are_refused(
    forks: Forks, tmp_path: Path, line: str, what: str
) -> None:
    text = f"import rankup\nfrom torch.utils.data import DataLoader\njob = rankup.init('run')\n{line}\n"
    assert f"{what} must be the same on all ranks, got" in ran(forks, tmp_path, text, ranks=3, code=2)


@pytest.mark.parametrize("where", ["outside", "before", "epoch"])
def test_tracked_object_that_changes_outside_a_step_is_refused(forks: Forks, tmp_path: Path, where: str) -> None:
    output = by_hand(forks, tmp_path, code=2, ranks=1, MISTAKE=where)
    assert "track: best must change only inside job.step" in output


@pytest.mark.parametrize("first", [0, 3])
def test_optimizer_state_that_cannot_be_kept_is_found_when_it_is_created(
    forks: Forks, tmp_path: Path, first: int
) -> None:
    """A GradScaler skips the first steps of an optimizer."""
    output = ran(forks, tmp_path, f"""
import torch, rankup

class Precise(torch.optim.SGD):
    def step(self):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["mean"] = p.detach().to(torch.complex128)

job = rankup.init("runs/precise", tensorboard=False)
model = torch.nn.Linear(1, 1)
precise = Precise(model.parameters(), lr=0.1)
job.track(model=model, precise=precise)
for step in job.steps(2000):
    print("step", step)
    model(torch.ones(1, 1)).sum().backward()
    with job.step():
        if step >= {first}:
            precise.step()
""", code=2)
    assert re.findall(r"step (\d+)$", output, re.MULTILINE) == [*map(str, range(first + 1))]
    assert "state: precise/state.0.mean must be" in output


@pytest.mark.parametrize("change", ["", "m[2].weight.detach().mul_(2)"])
def test_evaluation_with_fsdp_is_no_change_in_the_first_steps(forks: Forks, tmp_path: Path, change: str) -> None:
    """FSDP2 leaves the root's parameters gathered after a forward pass without a backward pass."""
    output = ran(forks, tmp_path, f"""
import torch, rankup
from torch.distributed.fsdp import fully_shard

job = rankup.init("runs/split", device="cpu", tensorboard=False)
m = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
fully_shard(m[0])
fully_shard(m)
adam = torch.optim.AdamW(m.parameters(), lr=0.1)
job.track(m=m, adam=adam)
for epoch in job.epochs(2):
    for batch in job.batches([1, 2]):
        m(torch.ones(2, 4)).sum().backward()
        with job.step():
            adam.step()
            adam.zero_grad()
    with torch.no_grad():
        {change or 'm(torch.ones(2, 4))'}
job.finish()
""", ranks=2, code=2 if change else 0)
    assert ("track: m must change only inside job.step" in output) == bool(change)


def test_change_before_a_stop_counts_once(forks: Forks, tmp_path: Path) -> None:
    text = (
        "import os, signal, rankup\njob, count = rankup.init('run'), {'n': 0}\njob.track(count=count)\n"
        "for epoch in job.epochs(2):\n    for _ in job.batches([1, 2]):\n        with job.step():\n            pass\n"
        "    with job.change():\n        count['n'] += 1\n"
        "    if not epoch and 'STOP' in os.environ:\n        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        while job.group.record.stop:\n            pass\n"
        "print('count', count)\njob.finish()\n"
    )
    assert "saved at step 2" in ran(forks, tmp_path, text, STOP="1", code=143)
    assert said(ran(forks, tmp_path, text), "count") == "{'n': 2}"


def test_scheduler_step_after_an_epoch_without_a_last_step_counts_once(forks: Forks, tmp_path: Path):
    text = (
        "import os, warnings, torch, rankup\nwarnings.filterwarnings('ignore', 'Detected call')  # of a new process\n"
        "job = rankup.init('run', save_every_steps=1)\nnet = torch.nn.DataParallel(torch.nn.Linear(1, 1))\n"
        "sgd = torch.optim.SGD(net.parameters(), lr=0.5)\nhalf = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)\n"
        "job.track(net=net, sgd=sgd, half=half)\nfor epoch in job.epochs(2):\n"
        "    for n, x in enumerate(job.batches([torch.ones(1)] * 3)):\n        net(x).backward()\n"
        "        if n % 2:\n            with job.step():\n                sgd.step()\n                sgd.zero_grad()\n"
        "    half.step()\n"
        "    if not epoch and 'DIE' in os.environ:\n        job.run.saver.wait()\n        os.kill(os.getpid(), 9)\n"
        "print('rate', half.get_last_lr(), net.module.weight.item())\njob.finish()\n"
    )
    whole = said(ran(forks, tmp_path, text), "rate")
    (tmp_path / "run").rename(tmp_path / "whole")
    ran(forks, tmp_path, text, DIE="1", code=-signal.SIGKILL)
    assert said(ran(forks, tmp_path, text), "rate") == whole
    assert whole.startswith("[0.125] ")


@pytest.mark.parametrize("passes", ["range(3)", "job.epochs(3)"])
def test_changes_between_passes_count_once(forks: Forks, tmp_path: Path, passes: str) -> None:
    """So does a scheduler's step, which needs no job.change."""
    text = (
        "import os, warnings, torch, rankup\njob, count = rankup.init('run', save_every_steps=1), {'n': 0}\n"
        "warnings.filterwarnings('ignore', 'Detected call')\nsgd = torch.optim.SGD([torch.zeros(1)], lr=1.0)\n"
        "half = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)\njob.track(count=count, sgd=sgd, half=half)\n"
        f"for _ in {passes}:\n    for _ in (1, 2):\n        with job.change():\n"
        "            count['n'] += 1\n        for _ in job.batches([1, 2]):\n            with job.step():\n"
        "                pass\n            if job.step_number == 7 and 'DIE' in os.environ:\n"
        "                job.run.saver.wait()\n                os.kill(os.getpid(), 9)\n    half.step()\n"
        "print('count', count, half.get_last_lr())\njob.finish()\n"
    )
    ran(forks, tmp_path, text, DIE="1", code=-signal.SIGKILL)
    assert said(ran(forks, tmp_path, text), "count") == "{'n': 6} [0.125]"


@pytest.mark.parametrize("loader", ["StatefulDataLoader(range(4), batch_size=None, num_workers=1)", "range(4)"])
def test_loop_without_epochs_resumes_in_its_newest_pass(forks: Forks, tmp_path: Path, loader: str) -> None:
    """A loader's saved state is that of its newest pass. `break` ends a pass. The second stop comes before a step."""
    text = (
        "import os, signal, time, warnings, rankup\nfrom torchdata.stateful_dataloader import StatefulDataLoader\n"
        "from tests.rigs.faulting_workload import stop_is_known\n"
        "warnings.filterwarnings('ignore', \"'set_vital'\")\njob, seen = rankup.init('run'), []\njob.track(seen=seen)\n"
        "def stop():\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    while not stop_is_known(job.group.stop):\n        time.sleep(0.001)\n"
        f"loader = {loader}\nfor _ in range(3):\n    for x in job.batches(loader):\n        with job.step():\n"
        "            seen.append(x)\n        if job.step_number == 3:\n            break\n"
        "        if job.step_number == 5 and 'STOP' in os.environ:\n            stop()\n"
        "    job.log(samples=len(seen))\n    if 'AGAIN' in os.environ:\n        stop()\n"
        "print('seen', seen)\njob.finish()\n"
    )
    output = ran(forks, tmp_path, text, STOP="1", code=143)
    assert ("the random numbers that this loader's workers draw" in output) == ("num_workers" in loader)
    ran(forks, tmp_path, text, AGAIN="1", code=143)
    assert said(ran(forks, tmp_path, text), "seen") == str([0, 1, 2, *range(4), *range(4)])


CYCLES = (
    "import os, signal, warnings, torch, rankup\nfrom torch.utils.data import DataLoader, IterableDataset\n"
    "from torchdata.stateful_dataloader import StatefulDataLoader\nwarnings.filterwarnings('ignore', \"'set_vital'\")\n"
    "class Own(IterableDataset):\n    def __iter__(self):\n        yield from torch.randperm(5)\n"
    "class Five(IterableDataset):\n    def __iter__(self):\n        yield from range(5)\n"
    "job, seen = rankup.init('run', save_every_steps=1), []\njob.track(seen=seen)\n"
    "own, stateful = DataLoader(Own(), batch_size=2), StatefulDataLoader(Five(), batch_size=None)\n"
    "shuffled = DataLoader(range(12), batch_size=6, shuffle=True)\n"
    "cycles = [*map(job.cycle, (shuffled, own, stateful))]\n"
    "def train():\n    got = job.gather([torch.as_tensor(next(each)).tolist() for each in cycles])\n"
    "    with job.step():\n        seen.append(got)\n    if str(job.step_number) == os.environ.get('DIE'):\n"
    "        job.save(wait=True)\n        os.kill(os.getpid(), signal.SIGKILL)\n"
)
LOOPS = {
    "steps": "for _ in job.steps(21):\n    train()\n",
    "epochs": "for _ in job.epochs(3):\n    for _ in job.batches(DataLoader(range(7))):\n        train()\n",
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("die", [5, 7, 16])
def test_cycles_go_on_where_each_of_them_was(forks: Forks, tmp_path: Path, once: Once, loop: str, die: int) -> None:
    """Steps 5 and 7 are the last ones of a cycle's pass and of an epoch. It goes on over another loader's epochs."""
    text = f"{CYCLES}{LOOPS[loop]}print('seen', seen)\njob.finish()\n"
    (tmp_path / "whole").mkdir()
    whole = once(f"cycles-{loop}", lambda: said(ran(forks, tmp_path / "whole", text, ranks=3), "seen"))
    ran(forks, tmp_path, text, ranks=3, DIE=str(die), code=-signal.SIGKILL)
    assert said(ran(forks, tmp_path, text, ranks=3), "seen") == whole
    assert sorted(number for ranks in json.loads(whole)[:2] for first, *_ in ranks for number in first) == [*range(12)]


AGAIN = (
    "import rankup\njob, seen, loader = rankup.init('run'), [], [1, 2]\njob.track(seen=seen)\nit = iter(())\n"
    "def take():\n    global it\n    try:\n        return next(it)\n    except StopIteration:\n"
    "        it = iter(job.batches(loader))\n        return next(it)\n"
)


@pytest.mark.parametrize(("text", "why"), [
    (f"{AGAIN}for _ in job.steps(4):\n    take()\n    with job.step():\n        seen.append(1)\n", "read by job.cycle"),
    (f"{AGAIN}while True:\n    take()\n    with job.step():\n        seen.append(1)\n", "read by job.cycle"),
    (f"{AGAIN}it = iter(job.batches(loader))\nfor _ in job.steps(4):\n    if next(it, None) is None:\n"
     "        it = iter(job.batches(loader))\n        next(it)\n    with job.step():\n        seen.append(1)\n",
     "read by job.cycle"),
    (f"{AGAIN}it = job.cycle(loader)\nwhile True:\n    next(it)\n", "cycle: next must be called in a loop over"),
    (f"{AGAIN}for _ in job.steps(4):\n    next(job.cycle(loader))\n", "cycle: it must be called before the first step"),
    (f"{AGAIN}it = job.cycle([])\nfor _ in job.steps(4):\n    next(it)\n", "must yield a batch in each pass, got none"),
])
def test_loader_that_begins_again_where_a_resume_could_not_follow_is_refused(
    forks: Forks, tmp_path: Path, text: str, why: str
) -> None:
    """A resumed loop would begin a loader again once for all of its finished passes."""
    assert why in ran(forks, tmp_path, text, code=2)


def test_passes_that_have_ended_are_asked_for_no_state(forks: Forks, tmp_path: Path) -> None:
    text = (
        "import os, rankup\nclass Own:\n    n = calls = 0\n    def __len__(self):\n        return 2\n"
        "    def __iter__(self):\n        while self.n < 2:\n            self.n += 1\n            yield self.n\n"
        "        self.n = 0\n    def state_dict(self):\n        Own.calls += 1\n        return {'n': self.n}\n"
        "    def load_state_dict(self, state):\n        self.n = state['n']\n"
        "job, seen = rankup.init('run'), []\njob.track(seen=seen)\nloader, calls = Own(), []\nfor _ in range(30):\n"
        "    for x in job.batches(loader):\n        before = Own.calls\n        with job.step():\n"
        "            seen.append(x)\n        calls.append(Own.calls - before)\n"
        "        if job.step_number == 31 and 'DIE' in os.environ:\n            job.save(wait=True)\n"
        "            os.kill(os.getpid(), 9)\nprint('calls', max(calls), seen == [1, 2] * 30)\njob.finish()\n"
    )
    ran(forks, tmp_path, text, DIE="1", code=-signal.SIGKILL)
    assert said(ran(forks, tmp_path, text), "calls") == "1 True"


@pytest.mark.parametrize("block", ["step", "change"])
def test_save_inside_a_step_or_change_is_refused_and_log_is_not(forks: Forks, tmp_path: Path, block: str) -> None:
    text = f"import rankup\njob = rankup.init('run')\nwith job.{block}():\n    job.log(n=1)\n    job.save()\n"
    assert "save: it must be called outside job.step and job.change" in ran(forks, tmp_path, text, code=2)


def test_several_steps_for_one_batch_are_reported(forks: Forks, tmp_path: Path) -> None:
    """A resume between these steps continues with the next batch."""
    text = (
        "import rankup\njob = rankup.init('run')\nfor _ in job.batches([1, 2]):\n    for _ in range(2):\n"
        "        with job.step():\n            pass\njob.finish()\n"
    )
    output = ran(forks, tmp_path, text)
    assert output.count("a batch took several steps") == 1


def test_job_weight_is_restored_after_an_evaluation(forks: Forks, tmp_path: Path) -> None:
    """A loop that reads its loader's weight gets no advice to multiply the loss by job.weight."""
    text = (
        "import rankup\nfrom torch.utils.data import DataLoader\njob = rankup.init('run')\n"
        "batches = job.batches(DataLoader(range(4), batch_size=3))\n"
        "for part in batches:\n    with job.step():\n        own = [batches.weight]\n"
        "left = None\n"
        "for part in batches:\n"
        "    del left\n    own += [job.weight]\n"  # this ends the evaluation in `left`
        "    own += [job.weight for _ in job.eval_batches([1], pad=True)]\n    own += [job.weight]\n"
        "    for _ in job.eval_batches([1, 2]):\n        break\n"
        "    own += [job.weight]\n    next(left := job.eval_batches([1, 2]))\n"
        "    with job.step():\n        pass\n"
        "print(f'own-{job.rank} {own}\\n', end='')\njob.finish()\n"
    )
    output = ran(forks, tmp_path, text, ranks=2)
    assert "multiply the loss" not in output
    assert said(output, "own-0") == str([2.0, 4 / 3, 1.0, 4 / 3, 4 / 3, 2.0, 1.0, 2.0, 2.0])
    assert said(output, "own-1") == str([0.0, 2 / 3, 0.0, 2 / 3, 2 / 3, 0.0, 0.0, 0.0, 0.0])


def test_persistent_workers_of_loaders_from_earlier_epochs_end(forks: Forks, tmp_path: Path) -> None:
    text = (
        "import psutil, rankup\nfrom torch.utils.data import DataLoader\njob = rankup.init('run', save_every_steps=0)\n"
        "for _ in job.epochs(4):\n"
        "    for _ in job.batches(DataLoader([1.0], num_workers=1, persistent_workers=True)):\n"
        "        with job.step():\n            pass\nprint('workers', len(psutil.Process().children()))\njob.finish()\n"
    )
    output = ran(forks, tmp_path, text)
    assert said(output, "workers") in ("0", "1")


def test_finished_job_keeps_no_tracked_object_alive(forks: Forks, tmp_path: Path) -> None:
    text = (
        "import gc, weakref, torch, rankup\njob, model = rankup.init('run'), torch.nn.Linear(1, 1)\n"
        "job.track(model=model, sgd=torch.optim.SGD(model.parameters()))\n"
        "for _ in job.steps(1):\n    with job.step():\n        pass\n"
        "job.finish()\nseen = weakref.ref(model)\ndel job, model\ngc.collect()\nprint('left', seen())\n"
    )
    assert said(ran(forks, tmp_path, text), "left") == "None"


def test_owner_is_checked_before_a_written_result_gets_its_name(forks: Forks, tmp_path: Path) -> None:
    """Otherwise a process that was frozen in between would overwrite its successor's result."""
    text = (
        "import rankup\nfrom pathlib import Path\njob, seen = rankup.init('run'), []\nlook = job.run.owner.check\n"
        "def check():\n    look()\n    seen.extend(each.name for each in Path('run').glob('*result.json*'))\n"
        "job.run.owner.check = check\nfor _ in job.steps(1):\n    with job.step():\n        pass\n"
        "job.reporting.result()\njob.finish()\nprint('seen', *seen)\n"
    )
    assert re.match(r"\S+result\.json\.\w+", said(ran(forks, tmp_path, text), "seen"))


@pytest.mark.parametrize("loop", ["batches([1, 2])", "steps(2)"])
def test_loop_that_changes_state_without_a_step_is_refused(forks: Forks, tmp_path: Path, loop: str) -> None:
    text = (
        "import rankup\njob, count = rankup.init('run'), {'n': 0}\njob.track(count=count)\n"
        f"for _ in job.{loop}:\n    count['n'] += 1\njob.finish()\n"
    )
    assert "track: count must change only inside job.step" in ran(forks, tmp_path, text, code=2)


def test_slow_rank_is_named_and_status_has_speed_and_goodput(
    forks: Forks, tmp_path: Path
) -> None:
    """The steps report no values, and the script names no run. Both ranks also write stacks."""
    output = forks.ends("launch", "--nproc=2", "-m", "tests.job.slow_script", cwds=[tmp_path])
    assert re.search(r"rank 1 \(.*\) is \d+ % slower than the other, since step \d+: compute", output)
    assert "threads watch\n" in output
    assert "threads lease reporter watch\n" in output  # of rank 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tests.job.slow_script"]
    run = tmp_path / "runs" / "tests.job.slow_script"
    assert [rank.rank for rank in stacks.written(run)] == [0, 1]
    found = look(run, now=time.time())
    assert (found["state"], found["step"], found["total_steps"], found["unit"]) == ("finished", 100, 100, "steps")
    assert found["per_s"] > 0
    assert found["goodput"]["share"] > 0
    assert found["metrics"].keys() >= {"train/steps_per_s"}


@pytest.mark.parametrize("value", ["'good'", "torch.ones(3)", "None", "[1.0]"])
@pytest.mark.parametrize("call", ["job.log(x=VALUE)", "with job.step(x=VALUE): pass"])
def test_metric_that_is_no_number_is_the_users_mistake(forks: Forks, tmp_path: Path, call: str, value: str) -> None:
    text = "import rankup, torch\njob = rankup.init('run', log_every_steps=1)\n"
    text += f"{call.replace('VALUE', value)}\njob.finish()"
    output = ran(forks, tmp_path, text, code=2)
    assert ": x must be a number, got" in output
    assert "Traceback" not in output
