"""Settings of a run: a resume with others is refused, or they are really in effect. So are options of optimizers."""

import argparse
import json
import re
import signal
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from rankup.errors import UserError
from rankup.loop.changes import Options, differing, options_of, settings_of
from tests.job.test_loop import ran, said
from tests.observe.test_status import as_json, status
from tests.rigs.fork_server import Forks

LOOP = """
import argparse, os, signal, torch, rankup
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
for name, kind, default in (("--lr", float, 0.1), ("--epochs", int, 2), ("--momentum", float, 0.5)):
    parser.add_argument(name, type=kind, default=default)
parser.add_argument("--api-key", default="swordfish")
parser.add_argument("--local-rank", default=os.environ["RANK"])
args = parser.parse_args(os.environ.get("OPTIONS", "").split())
job = rankup.init("run", settings=args, may_change={"epochs", "lr"}, tensorboard=False, log_every_steps=1)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
sgd = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
half = torch.optim.lr_scheduler.StepLR(sgd, 3, 0.5)
job.track(model=model, sgd=sgd, half=half)
for epoch in job.epochs(args.epochs):
    for x in job.batches(torch.utils.data.DataLoader(torch.arange(40.0).reshape(10, 4) / 40, batch_size=2)):
        loss = model(x).square().mean()
        sgd.zero_grad()
        loss.backward()
        with job.step(lr=sgd.param_groups[0]["lr"]):
            sgd.step()
            half.step()
        where = f"{job.rank}:{job.step_number}"
        if where == os.environ.get("DIE") and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if where == os.environ.get("STOP"):
            os.kill(os.getpid(), signal.SIGTERM)
            while not job.group.stop.requested:
                pass
if job.is_main:
    print("digest", model.module.weight.tolist())
job.finish()
"""


def rates(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [line["train/lr"] for line in lines if "train/lr" in line]


def test_changed_setting_is_refused_or_really_in_effect(forks: Forks, tmp_path: Path) -> None:
    """With three ranks; the changed learning rate counts from the resume on, also if a rank is killed after it."""
    ran(forks, tmp_path, LOOP, ranks=3, code=143, STOP="0:4")
    done = len(rates(tmp_path))
    assert 4 <= done < 10
    refused = ran(forks, tmp_path, LOOP, ranks=3, code=2, OPTIONS="--momentum=0.9 --lr=0.2")
    assert re.findall("was begun with other settings: (.*?)\\. ", refused) == ["momentum was 0.5, is 0.9"]
    line = ("launch", "--nproc=3", "script.py")
    again = forks.ends(*line, cwds=[tmp_path], env={"OPTIONS": "--lr=0.2 --epochs=3", "DIE": f"1:{done + 3}"})
    assert "no finished step was lost" in again
    assert "settings  api_key ***, epochs 3, lr 0.2, momentum 0.5\n" in again
    assert "  epochs was 2, is 3\n" in again
    assert f"sgd.lr: 0.1 -> 0.2, sgd.initial_lr: 0.1 -> 0.2, from step {done} on" in again
    expected = [(0.1 if step < done else 0.2) * 0.5 ** (step // 3) for step in range(15)]
    assert rates(tmp_path) == pytest.approx(expected)
    # The digest is that of a script that sets the rate at this step by itself
    (tmp_path / "plain").mkdir()
    change = f"if half.last_epoch == {done}:\n                sgd.param_groups[0]['lr'] *= 2\n"
    by_hand = LOOP.replace("            half.step()\n", f"            half.step()\n            {change}")
    plain = ran(forks, tmp_path / "plain", by_hand, ranks=3, OPTIONS="--epochs=3")
    assert said(again) == said(plain)
    # Status shows the newest settings, and nothing shows the key
    assert as_json("--run-dir", tmp_path, "run")["settings"]["lr"] == "0.2"
    assert "settings  api_key " in status("--run-dir", tmp_path, "run")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [path for path in files if b"swordfish" in path.read_bytes()]


def test_changed_option_without_a_changed_setting_is_said_and_not_applied(forks: Forks, tmp_path: Path) -> None:
    ran(forks, tmp_path, LOOP, ranks=2, code=143, STOP="0:2")
    edited = LOOP.replace("momentum=args.momentum", "momentum=0.9")
    output = ran(forks, tmp_path, edited, ranks=2, code=143, STOP="0:7")
    found = re.findall(r"track: (.*): the script sets it so, but the run goes on as in its checkpoint\. (.*)", output)
    assert found == [("sgd.momentum: 0.5 -> 0.9", "To apply it give rankup.init(may_change={'momentum'})")]
    named = edited.replace('may_change={"epochs", "lr"}', "may_change={'momentum'}")
    output = ran(forks, tmp_path, named, ranks=2)
    assert "track  sgd.momentum: 0.5 -> 0.9, from step" in output


BUILT = """
import os, signal, torch, rankup

job = rankup.init("run", tensorboard=False)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
first, second = model
orders = {"same": model.parameters(), "swapped": [*second.parameters(), *first.parameters()]}
kind, order, schedule = os.environ.get("BUILT", "Adam same StepLR").split()
adam = getattr(torch.optim, kind)(orders[order], lr=0.1)
schedule = getattr(torch.optim.lr_scheduler, schedule)(adam, 5)
job.track(adam=adam, schedule=schedule)
job.track(model=model)
for step in job.steps(6):
    adam.zero_grad()
    model(torch.ones(4)).sum().backward()
    with job.step():
        adam.step()
        schedule.step()
    if step == 2 and "BUILT" not in os.environ:
        os.kill(os.getpid(), signal.SIGTERM)
        while not job.group.stop.requested:
            pass
"""


def test_optimizer_that_is_built_in_another_way_is_refused(forks: Forks, tmp_path: Path) -> None:
    """Its states would go to other parameters of the same shapes, and torch does not see it."""
    ran(forks, tmp_path, BUILT, code=143)
    for built, why in [
        ("Adam swapped StepLR", "adam must get the parameters in the same order as in "),
        ("NAdam same StepLR", "adam must be of class Adam as in "),
        ("Adam same CosineAnnealingLR", "schedule must be of class StepLR as in "),
    ]:
        assert why in ran(forks, tmp_path, BUILT, code=2, BUILT=built)
    ran(forks, tmp_path, BUILT, BUILT="Adam same StepLR")


@pytest.mark.parametrize(("call", "why"), [
    ("settings={'where': job_rank}", "settings: where must be "),
    ("settings={'model': object()}", "settings: model must be a number, text, list or dict, got <object"),
    ("settings={'data': 's3://key:word@b/x'}", "settings: data must be an address without user"),
    ("store='s3://key:word@b/x'", "rankup.init: store must be an address without user"),
    ("settings={'data': {'x': ['s3://key:word@b/x']}}", "settings: x must be an address without user"),
    ("settings=[1]", "settings must be a dict, or an object with attributes, got [1]. Give vars(args)."),
    ("settings={'text': {(1, 2): 3}}", "settings: text must be a number, text, list or dict, got {(1, 2): 3}"),
    ("may_change='lr'", "rankup.init: may_change must be a set of names, got 'lr'. Write {\"lr\"}."),
    ("may_change=None", "rankup.init: may_change must be a set of names, got None"),
    ("tracker='wandbb'", "rankup.init: tracker must be one of none, mlflow, wandb, got wandbb"),
    ("save='asink'", "rankup.init: save must be one of auto, sync, got asink"),
    ("log_every_steps=0", "rankup.init: log_every_steps must be a whole number >= 1, got 0."),
    ("save_every_steps=-1", "rankup.init: save_every_steps must be a whole number >= 0, got -1."),
    ("compare_every_steps=0.5", "rankup.init: compare_every_steps must be a whole number >= 0, got 0.5."),
    ("memory_every_steps=True", "rankup.init: memory_every_steps must be a whole number >= 0, got True."),
    ("mirror=None", "rankup.init: mirror must be a folder or an address, got None."),
    ("keep=0", "rankup.init: keep must be a whole number >= 1, got 0."),
    ("seed='1'", "rankup.init: seed must be a whole number, got '1'."),
    ("step_timeout_s='600'", "rankup.init: step_timeout_s must be a number of seconds >= 0, got '600'."),
    ("step_timeout_s=float('nan')", "rankup.init: step_timeout_s must be a number of seconds >= 0, got nan."),
    ("save_timeout_s=0", "rankup.init: save_timeout_s must be a number of seconds >= 1, got 0."),
    ("join_timeout_s=float('inf')", "rankup.init: join_timeout_s must be at most 1,000,000,000 seconds, got inf."),
    ("fresh='no'", "rankup.init: fresh must be True or False, got 'no'."),
    ("again=None", "rankup.init: again must be True or False, got None."),
    ("tensorboard=0", "rankup.init: tensorboard must be True or False, got 0."),
    ("device=0", 'rankup.init: device must be "auto", "cpu", "cuda" or "cuda:1", got 0.'),
    ("device='cpu:7'", """rankup.init: device must be "auto", "cpu", "cuda" or "cuda:1", got 'cpu:7'."""),
    (r"on_end='a\0b'", r"rankup.init: on_end must be a shell command, got 'a\x00b'."),
])
def test_settings_that_no_run_can_keep_are_refused(call: str, why: str, forks: Forks, tmp_path: Path) -> None:
    text = f"import os, rankup\njob_rank = os.environ['RANK']\njob = rankup.init('run', {call})\n"
    output = ran(forks, tmp_path, text, ranks=2, code=2)
    assert why in output
    assert "key:word" not in output


def test_init_takes_a_mirror(forks: Forks, tmp_path: Path) -> None:
    text = (
        "import pathlib, rankup\n"
        "job, count = rankup.init('run', mirror=pathlib.Path('copies'), save='sync'), {'n': 0}\n"
        "job.track(count=count)\nfor _ in job.steps(3):\n    with job.step():\n        count['n'] += 1\njob.finish()\n"
    )
    ran(forks, tmp_path, text)
    assert [*(tmp_path / "copies").rglob("step-00000003*")]


def test_settings_are_compared_by_what_they_say() -> None:
    found = settings_of({"b": {3, 1}, "a": Path("x"), "f": signal.signal, "t": (1, 2), "db_password": "x", "tokens": 3})
    assert found == {"a": "x", "b": [1, 3], "db_password": "***", "f": "signal", "t": [1, 2], "tokens": 3}
    assert differing({"a": 1, "b": None}, {"a": 1, "b": 0, "c": "x"}) == {
        "b": "b was null, is 0", "c": 'c was nothing, is "x"'
    }


class Plain:
    lr, _hidden = 0.1, 2

    def __init__(self) -> None:
        self.name = "x"

    @property
    def half(self) -> float:
        return self.lr / 2


@dataclass(slots=True)
class Slots:
    lr: float = 0.1
    name: str = "x"


@pytest.mark.parametrize("given", [
    {"name": "x", "lr": 0.1}, Plain(), Slots(), types.MappingProxyType({"name": "x", "lr": np.float64(0.1)}),
    argparse.Namespace(lr=0.1, name="x"), type("Config", (), {"lr": 0.1, "name": "x"}),
])
def test_settings_in_any_object_are_kept_with_those_of_its_class(given: Any) -> None:
    assert settings_of(given) == {"lr": 0.1, "name": "x"}
    nested = {"slots": Slots(), "proxy": types.MappingProxyType({"a": 1}), 3: np.arange(2)}
    assert settings_of(nested) == {"3": [0, 1], "proxy": {"a": 1}, "slots": {"lr": 0.1, "name": "x"}}


@pytest.mark.parametrize(("name", "value"), [
    ("hf_token", "hf_swordfish"), ("hfToken", "hf_swordfish"), ("hub.token", "swordfish"), ("authtoken", "swordfish"),
    ("token", "short"), ("dbPassword", "x"), ("pin_password", 1234), ("ssh-passphrase", "x"), ("secret", {"user": "x"}),
    ("credentials", ["x", "y"]), ("wandbApiKey", "x"), ("private_key", "<x>"),
])
def test_credential_is_not_kept(name: str, value: Any) -> None:
    found = settings_of({name: value})[name]
    assert {*(found.values() if isinstance(found, dict) else found if isinstance(found, list) else [found])} == {"***"}


@pytest.mark.parametrize(("name", "before", "now"), [
    ("pad_token", "PAD", "EOS"), ("image_token", "<image>", "<picture>"), ("sep_token", "[SEP]", " [SEP]"),
    ("mask_token", {"content": "<mask>"}, {"content": "[MASK]"}), ("special_token", ["</s>"], ["<s>"]),
    ("image_token", 32000, 32001), ("num_tokens", 1, 2), ("tokenizer", "gpt2", "t5"), ("use_secret", True, False),
    ("token", None, 3), ("sort_key", "length", "name"),
])
def test_change_of_a_setting_that_only_sounds_like_a_credential_is_seen(name: str, before: Any, now: Any) -> None:
    assert settings_of({name: before}) == {name: before}
    assert differing(settings_of({name: before}), settings_of({name: now}))


def test_nested_settings_keep_no_secret_and_are_compared_in_any_order() -> None:
    nested = {"db": {"password": "swordfish", "user": "x"}, "logins": [argparse.Namespace(api_key="swordfish")]}
    found = settings_of({"wandb-token": "swordfish", **nested})
    assert "swordfish" not in str(found)
    assert found["db"] == {"password": "***", "user": "x"}
    assert not differing(settings_of({"m": {"a": 1, "b": 2}}), settings_of({"m": {"b": 2, "a": 1}}))


def made(lr: float, make: Any) -> tuple[Any, Any]:
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr, momentum=0.9)
    return sgd, make(sgd, lr)


def advance(sgd: Any, scheduler: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        sgd.step()
        scheduler.step()
        found.append(sgd.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("make", [
    lambda sgd, lr: schedulers.LambdaLR(sgd, lambda step: 1 / (1 + step)),
    lambda sgd, lr: schedulers.MultiStepLR(sgd, [3, 3, 8], 0.5),
    lambda sgd, lr: schedulers.CosineAnnealingLR(sgd, 20),
    lambda sgd, lr: schedulers.OneCycleLR(sgd, lr, total_steps=20),
    lambda sgd, lr: schedulers.SequentialLR(
        sgd, [schedulers.LinearLR(sgd, 0.1, total_iters=4), schedulers.ExponentialLR(sgd, 0.9)], [4]
    ),
], ids=["lambda", "steps", "cosine", "onecycle", "sequence"])
def test_changed_rate_follows_its_schedule_from_the_resume_on(make: Any) -> None:
    expected = advance(*made(0.3, make), 14)
    (sgd, scheduler), (again, follows) = made(0.1, make), made(0.3, make)
    firsts = [options_of(sgd), options_of(scheduler)]
    advance(sgd, scheduler, 6)
    found = [Options("sgd", again, firsts[0]), Options("scheduler", follows, firsts[1])]
    assert any(each.changes for each in found)
    again.load_state_dict(sgd.state_dict())
    follows.load_state_dict(scheduler.state_dict())
    for each in found:
        each.apply()
    assert advance(again, follows, 8) == pytest.approx(expected[6:])
    assert follows.get_last_lr() == [again.param_groups[0]["lr"]]


def test_option_that_training_has_changed_is_refused() -> None:
    def make(sgd: Any, lr: float) -> Any:
        return schedulers.CosineAnnealingWarmRestarts(sgd, 2 if lr == 0.1 else 3, T_mult=2)

    (sgd, scheduler), (_, follows) = made(0.1, make), made(0.2, make)
    options = Options("warm", follows, options_of(scheduler))
    advance(sgd, scheduler, 5)
    follows.load_state_dict(scheduler.state_dict())
    with pytest.raises(UserError, match=r"warm.T_i must have its first value, 2, to change to 3, got 4 by training"):
        options.apply()
