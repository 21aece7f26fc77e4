"""rankup finds what a loop trains beside the objects that it tracks: DDP modules, other optimizers. It says so if ranks
never average their gradients, or track different objects."""

import re
import signal
from pathlib import Path

import pytest

from tests.job.test_loop import ran, said
from tests.project.test_docs import fences
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT

START = """
import copy, hashlib, os, warnings
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import rankup
warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
job = rankup.init("run", {init})
net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))
adam = torch.optim.Adam(net.parameters(), 1e-2)

def averaged():
    for parameter in net.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= job.world_size

def batch(step):
    return torch.randn(9, 16, generator=torch.Generator().manual_seed(step)).chunk(job.world_size)[job.rank]
"""
END = """
    if step == 20 and "DIE" in os.environ:
        job.save(wait=True)
        os.kill(os.getpid(), 9)
print(f"digest-{job.rank}", hashlib.sha256(repr([*net.state_dict().values()]).encode()).hexdigest())
print("kinds", sorted({type(each).__name__ for each in job._wrappers.adopted}))
job.finish()
"""


def script(body: str, init: str = "") -> str:
    return START.replace("{init}", init) + body + END


def loop(made: str, steps: str) -> str:
    """Return a script that trains a DDP wrapper and tracks the module. `made`: where the wrapper is made."""
    wrap = "model = DistributedDataParallel(net)\n"
    return script(
        f"{wrap if made == 'before' else ''}job.track(net=net, adam=adam)\n{wrap if made == 'after' else ''}"
        f"for step in {steps}:\n    loss = model(batch(step)).square().mean()\n    adam.zero_grad()\n"
        "    loss.backward()\n    with job.step(loss=loss):\n        adam.step()\n",
        "compare_every_steps=1",
    )


@pytest.mark.parametrize(("made", "steps", "compiled"), [
    ("before", "range(job.step_number, 40)", ""), ("after", "job.steps(40)", ""),
    ("before", "job.steps(40)", "model = torch.compile(model, backend='eager')"),
])
def test_wrapper_around_a_tracked_module_is_found(
    forks: Forks, tmp_path: Path, made: str, steps: str, compiled: str
) -> None:
    """With three ranks DDP's order of sums changes after its first backward pass, if rankup does not fix it."""
    text = loop(made, steps).replace("job.track(", f"warnings.simplefilter('ignore')\n{compiled}\njob.track(")
    whole = said(ran(forks, tmp_path, text, ranks=3), "digest-0")
    (tmp_path / "run").rename(tmp_path / "whole")
    ran(forks, tmp_path, text, ranks=3, DIE="1", code=-signal.SIGKILL)
    output = ran(forks, tmp_path, text, ranks=3)
    assert "resumed from step-" in output
    assert {said(output, f"digest-{rank}") for rank in range(3)} == {whole}
    assert said(output, "kinds") == "['DistributedDataParallel']"


TRACKED = {
    "dict": "weights={name: each for name, each in net.named_parameters()}, adam=adam",
    "list": "weights=[*net.parameters()], adam=adam",
    "state_dict": "weights=net.state_dict(), adam=adam",
    "own object": "trainer=Trainer()",
}


@pytest.mark.parametrize("kind", TRACKED)
def test_wrapper_of_parameters_that_are_tracked_in_any_form_is_found(forks: Forks, tmp_path: Path, kind: str) -> None:
    """LoRA by hand tracks a dict of a few parameters. A trainer's class may return all state from its state_dict."""
    text = loop("before", "job.steps(40)").replace("job.track(net=net, adam=adam)", f"""
class Trainer:
    def state_dict(self):
        return {{"net": net.state_dict(), "adam": adam.state_dict()}}
    def load_state_dict(self, state):
        net.load_state_dict(state["net"]), adam.load_state_dict(state["adam"])
net[1] = nn.Identity()  # its buffers would not be tracked
adam = torch.optim.Adam(net.parameters(), 1e-2)
model = DistributedDataParallel(net)
job.track({TRACKED[kind]})""")
    output = ran(forks, tmp_path, text, ranks=3)
    (tmp_path / "run").rename(tmp_path / "whole")
    ran(forks, tmp_path, text, ranks=3, DIE="1", code=-signal.SIGKILL)
    again = ran(forks, tmp_path, text, ranks=3)
    assert said(again, "digest-0") == said(output, "digest-0")
    assert said(output, "kinds") == "['DistributedDataParallel']"


def test_buffers_of_a_step_that_trains_in_its_block_are_equal_on_all_ranks(forks: Forks, tmp_path: Path) -> None:
    """A GAN has all its forward passes in the block. If ranks kept other buffers, a rescue would keep those of one."""
    body = loop("before", "job.steps(40)").replace("    loss = model(", "    with job.step():\n        loss = model(")
    body = body.replace("    adam.zero", "        adam.zero").replace("    loss.back", "        loss.back")
    output = ran(forks, tmp_path, body.replace("    with job.step(loss=loss):\n", ""), ranks=2)
    assert said(output, "digest-0") == said(output, "digest-1")
    assert "the ranks differ" not in output


def test_wrapper_that_is_found_too_late_is_refused(forks: Forks, tmp_path: Path) -> None:
    output = ran(forks, tmp_path, loop("after", "range(job.step_number, 40)"), ranks=2, code=2)
    assert "track: it must be called after DistributedDataParallel has wrapped net" in output


def test_wrapper_made_after_the_first_step_is_reported(forks: Forks, tmp_path: Path) -> None:
    text = loop("before", "job.steps(40)").replace(
        "    loss = model(", "    if step == 3:\n        model = DistributedDataParallel(net)\n    loss = model("
    )
    output = ran(forks, tmp_path, text, ranks=2)
    assert output.count("a resume changes the last bits of net") == 1
    assert said(output, "digest-0") == said(output, "digest-1")


def test_communication_hook_whose_state_no_copy_holds_is_reported(forks: Forks, tmp_path: Path) -> None:
    hook = (
        "from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power\n"
        "model.register_comm_hook(power.PowerSGDState(None, 1, start_powerSGD_iter=3), power.powerSGD_hook)\n"
    )
    output = ran(forks, tmp_path, loop("before", "job.steps(9)").replace("for step", f"{hook}for step"), ranks=2)
    assert output.count("a resume changes the weights: no copy holds the state of DDP's powerSGD_hook") == 1


STEPS = """
job.track(net=net, adam=adam)
for step in job.steps(40):
    adam.zero_grad()
    {forward}.square().mean().backward()
    {before}
    with job.step():
        {inside}
        adam.step()
        {last}
"""


def trained(forward: str = "net(batch(step))", before: str = "", inside: str = "", last: str = "") -> str:
    return STEPS.format(forward=forward, before=before or "pass", inside=inside or "pass", last=last or "pass")


FROZEN = "net[0].requires_grad_(False)\nmodel = DistributedDataParallel(net)\nnet[0].requires_grad_(True)\n"
APART = {
    "no wrapper": trained(),
    "no gradients left": trained(last="adam.zero_grad()"),
    "all in the block": trained("torch.ones(1, requires_grad=True)", inside="net(batch(step)).sum().backward()"),
    "past the wrapper": "model = DistributedDataParallel(net)\n" + trained("model.module(batch(step))"),
    "unfrozen in the wrapper": FROZEN + trained("model(batch(step))"),
}


@pytest.mark.parametrize("kind", APART)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_never_average_are_the_users_mistake(forks: Forks, tmp_path: Path, kind: str, ranks: int) -> None:
    output = ran(forks, tmp_path, script(APART[kind]), ranks=ranks, code=2)
    assert output.count("the ranks never averaged them. Wrap it in DistributedDataParallel") == 1
    assert not (tmp_path / "run" / "disagreements.jsonl").exists()


EQUAL = {
    "averaged before the block": trained(before="averaged()"),
    "averaged in the block": trained(inside="averaged()"),
    "all state averaged": trained(last="[dist.all_reduce(each.data) or each.data.div_(job.world_size) for each in "
                                       "(*net.parameters(), *(s[k] for s in adam.state.values() for k in s))]"),
    "the same batch": trained("net(torch.ones(3, 16))"),
}


@pytest.mark.parametrize("kind", EQUAL)
def test_ranks_that_stay_equal_without_ddp_are_not_refused(forks: Forks, tmp_path: Path, kind: str) -> None:
    output = ran(forks, tmp_path, script(EQUAL[kind]), ranks=2)
    assert "error:" not in output


def test_local_sgd_says_so_and_is_told_what_a_resume_does(forks: Forks, tmp_path: Path) -> None:
    output = ran(forks, tmp_path, script(trained(), "compare_every_steps=0"), ranks=2)
    assert output.count("ranks may differ, and a resume gives all of them the state of one") == 1
    assert said(output, "digest-0") != said(output, "digest-1")


def test_optimizer_that_splits_its_state_is_refused(forks: Forks, tmp_path: Path) -> None:
    """As in some training programs, each rank keeps the state of its own parameters and sends their new values."""
    text = script(
        "numbered = [*enumerate(net.parameters())]\n"
        "class Split(torch.optim.Adam):\n    def step(self):\n        for n, each in numbered:\n"
        "            each.grad = each.grad if n % job.world_size == job.rank else None\n        super().step()\n"
        "        for n, each in numbered:\n            dist.broadcast(each.data, n % job.world_size)\n"
        "adam = Split(net.parameters(), 1e-2)\n" + trained(inside="averaged()")
    )
    output = ran(forks, tmp_path, text, ranks=2, code=2)
    assert output.count("track: adam must hold its whole state on each rank, got other states of equal weights") == 1


SPLIT = {
    "ZeroRedundancyOptimizer": "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
                               "adam = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=1e-2)\n",
    "FullyShardedDataParallel": "from torch.distributed.fsdp import FullyShardedDataParallel\n"
                                "net = nn.Sequential(FullyShardedDataParallel(net, device_id=torch.device('cpu')))\n",
}


@pytest.mark.parametrize("kind", SPLIT)
def test_state_that_ranks_split_unknown_to_rankup_is_refused(forks: Forks, tmp_path: Path, kind: str) -> None:
    text = script(f"warnings.simplefilter('ignore')\n{SPLIT[kind]}" + trained())
    output = ran(forks, tmp_path, text, ranks=2, code=2)
    assert len(re.findall(f"error: track: .* must hold its whole state on each rank, got {kind}", output)) == 1


NAMES = {
    "one more": ("job.track(net=net, **({'more': {'n': 1}} if job.is_main else {}))", "got more, net on rank 0"),
    "None": ("job.track(net=net, more={'n': 1} if job.is_main else None)", r"got None\. .* This is so on rank 1 \("),
    "no call": ("job.is_main and job.track(net=net)\nnext(job.steps(1))", r"got net on rank 0 \(.*\) and none on rank"),
    "a call more": ("job.track(net=net)\njob.is_main or job.track(more={})\nnext(job.steps(1))", "and more on rank 1"),
}


@pytest.mark.parametrize("kind", NAMES)
def test_ranks_that_track_other_objects_are_refused_at_once(forks: Forks, tmp_path: Path, kind: str) -> None:
    line, why = NAMES[kind]
    output = ran(forks, tmp_path, START.replace("{init}", "") + line, ranks=2, code=2)
    assert re.search(f"error: track: .*{why}", output)


def test_order_of_names_may_differ_among_ranks(forks: Forks, tmp_path: Path) -> None:
    line = "job.track(**dict(sorted({'net': net, 'adam': adam}.items(), reverse=job.is_main)))\njob.finish()\n"
    ran(forks, tmp_path, START.replace("{init}", "") + line, ranks=2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_optimizer_of_parameters_that_no_tracked_object_has_is_refused(
    forks: Forks, tmp_path: Path, ranks: int
) -> None:
    """The loss has a weight that is learned, and its module is not tracked."""
    text = script(
        "loss = DistributedDataParallel(nn.Linear(8, 1))\nmodel = DistributedDataParallel(net)\n"
        "adam.add_param_group({'params': loss.parameters()})\n" + trained("loss(model(batch(step)))")
    )
    output = ran(forks, tmp_path, text, ranks=ranks, code=2)
    assert "track: adam must train only parameters of tracked objects, got 2 of 8 tensors that belong to none" in output


def test_look_at_optimizers_keeps_no_tensor_of_the_loop_alive(forks: Forks, tmp_path: Path) -> None:
    text = (
        "import weakref\nimport torch, rankup\njob = rankup.init('run')\nnet = torch.nn.Linear(4, 1)\n"
        "sgd = torch.optim.SGD(net.parameters(), 0.1)\njob.track(net=net, sgd=sgd)\n"
        "def loop():\n    for step in job.steps(3):\n        big = torch.ones(8, 4)\n        seen = weakref.ref(big)\n"
        "        net(big).sum().backward()\n        with job.step():\n            sgd.step()\n        del big\n"
        "        print('alive' if seen() is not None else 'gone')\nloop()\njob.finish()\n"
    )
    output = ran(forks, tmp_path, text, ranks=1)
    assert (output.count("gone"), output.count("alive")) == (3, 0)


def test_loop_that_tracks_nothing_is_told_what_a_restart_loses(forks: Forks, tmp_path: Path) -> None:
    text = script("sgd = torch.optim.SGD(net.parameters(), 0.1)\n" + trained("net(batch(step))", inside="sgd.step()"))
    text = "".join(line for line in text.splitlines(keepends=True) if "job.track(" not in line)
    output = ran(forks, tmp_path, text, ranks=2)
    assert output.count("track: SGD steps and is not tracked: a restart resets its parameters") == 2  # one on each rank


def test_loop_of_the_first_page_trains_the_same_weights_on_all_ranks(forks: Forks, tmp_path: Path) -> None:
    """Followed to the letter, around a script for one GPU."""
    (loop,) = (text for language, text in fences((ROOT / "README.md").read_text()) if "job.batches" in text)
    before = (
        "import torch\nfrom torch import nn\nfrom torch.nn.parallel import DistributedDataParallel\n"
        "from torch.utils.data import DataLoader, TensorDataset\nmodel = nn.Linear(2, 1)\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "loader = DataLoader(TensorDataset(torch.rand(64, 2), torch.rand(64, 1)), batch_size=8, shuffle=True)\n"
    )
    own = "loss = (model(x) - y).square().mean(); optimizer.zero_grad(); loss.backward()"
    assert loop.count("        ... ") == 1
    text = before + loop.replace("        ... ", f"        {own} ")
    output = ran(forks, tmp_path, f"{text}print(f'bias-{{job.rank}}', model.module.bias.item())\n", ranks=2)
    assert said(output, "bias-0") == said(output, "bias-1")
    assert "error:" not in output
