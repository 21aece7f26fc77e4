"""`rankup submit FILE [ARGS]`: sends a snapshot of this folder along with a launch file, and follows the job.

The kind of the file decides: a batch file for Slurm (slurm.py), a manifest of Kubernetes (k8s.py), a compose file. The
user's own sbatch, ssh, rsync, kubectl and docker do the work, and each of their lines is printed. No torch here.
"""

import os
import re
import shlex
import signal
import subprocess
from argparse import Namespace
from pathlib import Path

from rankup.errors import FINISHED, Stopped, UserError, root_cause
from rankup.places.files import snapshot_text
from rankup.submit import k8s, slurm
from rankup.submit.machine import Machine, say
from rankup.submit.snapshot import Snapshot, take

KINDS = {"slurm": r"^#SBATCH ", "compose": r"^services:", "k8s": rf"^kind: *({'|'.join(k8s.OWNERS)})\b"}


def submit(given: Namespace) -> int:
    """Submit the job of a launch file. Returns the job's exit code, or 0 if the user stops looking at it. Raises
    UserError for a mistake, and ExpectedError if the other side can't be reached."""
    file, *args = given.words[1:] if given.words[0] == "--" else given.words
    path = Path(os.path.relpath(Path(file).parent.resolve() / Path(file).name))
    if path.parts[0] == ".." or not path.is_file():
        raise UserError(f"submit: FILE must be a launch file in this folder, got {file}. `rankup add` writes them.")
    text = path.read_text(errors="replace")
    kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, text, re.MULTILINE)), "")
    if not kind:
        raise UserError(f"submit: FILE must be a batch file, a compose file or a manifest of a job, got {file}.")
    if given.host and kind == "k8s":
        raise UserError(f"submit: --host must come with Slurm or compose, got {file}. kubectl has a context instead: "
                        "kubectl config use-context NAME")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return _send(given, path, kind, args)
    except KeyboardInterrupt:  # what comes after the job's start says so itself
        raise Stopped("Ctrl-C before the job was submitted: nothing runs.") from None
    except BrokenPipeError:  # the reader of the output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE


def _send(given: Namespace, path: Path, kind: str, args: list[str]) -> int:
    """Take the snapshot, submit the job and follow it. Returns the job's exit code."""
    with Machine(given.host) as machine:
        # The Dockerfile copies the wheel that `rankup add` put beside it, though git may ignore wheels
        wheels = map(str, Path().glob("rankup-*.whl")) if kind == "compose" else ()
        snapshot = take(Path(), str(path), *wheels)
        size, files = sum(len(content) for _, content in snapshot.files.values()), len(snapshot.files) - 2
        for note in snapshot.notes:
            say(note)
        say(f"snapshot {snapshot_text(**snapshot.record)}: {files} files, {size / 1e6:.1f} MB")
        if snapshot.diff and not given.dry_run:
            snapshot.keep(f"{snapshot.name}.diff", snapshot.diff)
        more = {"dry": given.dry_run, "follow": not given.detach}
        if kind == "k8s":
            return k8s.submit(snapshot, str(path), args, **more)
        return (slurm.submit if kind == "slurm" else _compose)(machine, snapshot, str(path), args, **more)


def _compose(machine: Machine, snapshot: Snapshot, file: str, args: list[str], *, dry: bool, follow: bool) -> int:
    """Build the image from the snapshot, start the containers and follow them. Returns their exit code."""
    text, host = Path(file).read_text(errors="replace"), machine.host
    if args and "${ARGS" not in text:
        raise UserError(f"{file}: its command must end in ${{ARGS:-}}, got none. Add it, or leave out {args[0]}.")
    env = {**({"ARGS": shlex.join(args)} if args else {}), **({"DOCKER_HOST": f"ssh://{host}"} if host else {})}
    if "${CONTEXT" in text:
        here = Machine("")
        env["CONTEXT"] = f"{here.folder}/.rankup/{snapshot.name if dry else here.place(snapshot)}"
        if not dry:
            here.do("prune")
    else:
        say(f"{file} builds from this folder. To build from the snapshot, write there `context: ${{CONTEXT:-.}}`")
    docker = ["docker", "compose", *(["-f", file] if file != "compose.yaml" else [])]
    shown = shlex.join([*(["env"] if env else []), *(f"{name}={value}" for name, value in env.items()), *docker])
    steps = [["up", "--build", "--detach"], *([["logs", "--follow"]] if follow else [])]
    try:
        for step in steps:
            print(f"+ {shown} {shlex.join(step)}", flush=True)
            code = 0 if dry else subprocess.run([*docker, *step], env={**os.environ, **env}, check=False).returncode
            if code:
                return code
    except FileNotFoundError:
        raise UserError("submit: docker must be installed here, got none.") from None
    except KeyboardInterrupt:
        follow = False
    if dry or not follow:
        say(f"Look: rankup status. Stop: {shown} stop. Come back: {shown} logs --follow")
        return FINISHED
    ended = [*docker, "ps", "--all", "--format", "{{.ExitCode}}"]
    done = subprocess.run(ended, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True, check=True)
    return root_cause([int(code) for code in done.stdout.split()])
