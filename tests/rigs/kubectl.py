"""A scripted kubectl: it reads manifests as the real one does, records each call, and answers from a file."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.rigs.containers import clean_environment
from tests.rigs.jobs import ROOT

Object = dict[str, Any]
# `pods`, `job`, `events`: what `get` prints, one after another; the last one stays. `fails`: what a verb says
ANSWERS: Object = {"taken": "", "pods": [[]], "job": [[]], "events": [[]], "fails": {}}
KUBECTL = f"""#!{sys.executable} -SE
import json, os, pathlib, subprocess, sys
words, stub = sys.argv[1:], pathlib.Path(os.environ["STUB"])
if "--local" in words:
    os.execv({shutil.which("kubectl")!r}, ["kubectl", *words])
answers = json.loads((stub / "answers.json").read_text())

def next_of(name):
    more, first = answers[name], answers[name][0]
    answers[name] = more[1:] or more
    (stub / "answers.json").write_text(json.dumps(answers))
    return first

with (stub / "calls").open("a") as calls:
    calls.write(json.dumps(words) + chr(10))
verb = words[0]
if verb in answers["fails"]:
    sys.exit(answers["fails"][verb])
if verb == "get" and "--ignore-not-found" in words:
    print(answers["taken"], end="")
elif verb == "get" and "jsonpath={{.metadata.uid}}" in words:
    print("uid-1", end="")
elif verb == "get" and "json" in words:
    if "pods" in words:
        found = {{"items": next_of("pods")}}
    elif "events" in words:
        found = {{"items": next_of("events")}}
    else:
        found = {{"status": {{"conditions": next_of("job")}}}}
    print(json.dumps(found))
elif verb == "exec":
    at = words.index("--") + 1
    (stub / "runs").mkdir(exist_ok=True)
    command = [word.replace("/runs", str(stub / "runs")) for word in words[at:]]
    sys.exit(subprocess.run(command).returncode)
elif verb == "logs":
    print("the log of all pods")
"""


class Kubectl:
    """Runs `rankup submit` in `folder` with the scripted kubectl, whose files are in `stub`."""

    def __init__(self, folder: Path, stub: Path, answers: Mapping[str, Any]) -> None:
        self.folder, self.stub = folder, stub
        (stub / "bin").mkdir(parents=True)
        (stub / "bin" / "kubectl").write_text(KUBECTL)
        (stub / "bin" / "kubectl").chmod(0o755)
        (stub / "answers.json").write_text(json.dumps({**ANSWERS, **answers}))

    def submit(self, *words: str) -> tuple[int, str]:
        path = f"{self.stub / 'bin'}:{os.environ['PATH']}"
        env = {**clean_environment(), "PATH": path, "STUB": str(self.stub), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-m", "rankup", "submit", *words], cwd=self.folder, env=env, text=True, timeout=300,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False,
        )
        assert "Traceback" not in done.stdout, done.stdout
        return done.returncode, done.stdout

    def calls(self, verb: str) -> list[list[str]]:
        calls = self.stub / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        return [words for words in map(json.loads, lines) if words[0] == verb]


def pod(name: str, *, ready: bool = True, code: int | None = None, **status: Any) -> Object:
    """Return a pod as the cluster shows it: it runs, has ended with `code`, or waits."""
    state = {"terminated": {"exitCode": code}} if code is not None else {"running": {}}
    shown = {"containerStatuses": [{"state": state}]} if ready else {}
    return {"metadata": {"name": name}, "status": {**shown, **status}}
