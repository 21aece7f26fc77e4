"""A batch file for Slurm: `sbatch` in the snapshot, here or on a login node, and the job's output."""

import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from rankup.errors import FAULT, FINISHED, ExpectedError, UserError
from rankup.slurm_task import fields
from rankup.submit.machine import Machine, say, uninterrupted
from rankup.submit.snapshot import Snapshot

FLAG = re.compile(r"(--output|--error|--array|--open-mode|-[oea])=?(.*)")
# What a snapshot can't change: a line that goes to, or runs, a path outside of it
ELSEWHERE = re.compile(r"^(?!\s*#).*?(\bcd +[\"']?(?:/|~|\$\{?HOME)\S*|(?<![^\s\"'])/\S+\.py\b)", re.MULTILINE)
LIVE = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING",
        "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "UNKNOWN")


def options(text: str) -> list[str]:
    """Return sbatch's options that leave the output of a batch file where it would be without a snapshot. A requeued
    job goes on in the same file."""
    found = dict[str, str]()
    for line in re.findall(r"^#SBATCH\s(.*)", text, re.MULTILINE):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # one quotation mark
            words = line.split()
        for word, after in pairwise([*words, ""]):
            if flag := FLAG.fullmatch(word):
                short = {"-o": "--output", "-e": "--error", "-a": "--array"}.get(flag[1], flag[1])
                found[short] = flag[2] or after
    output = "slurm-%A_%a.out" if "--array" in found else "slurm-%j.out"
    paths = {flag: found.get(flag, default) for flag, default in (("--output", output), ("--error", "/"))}
    kept = [f"{flag}=../../{path}" for flag, path in paths.items() if path[0] != "/"]
    return ["--chdir=.", *kept, *([] if "--open-mode" in found else ["--open-mode=append"])]


def submit(machine: Machine, snapshot: Snapshot, file: str, args: Sequence[str], *, dry: bool, follow: bool) -> int:
    """Submit the batch file, and follow the job. Returns the job's exit code, or 0 without `follow`. Raises UserError
    if Slurm refuses the job."""
    text = Path(file).read_text(errors="replace")
    if args and not re.search(r"\$[@*{1-9]", text):
        raise UserError(f'{file}: it must pass "$@" to the script, got none. Add it, or leave out {args[0]}.')
    if found := ELSEWHERE.search(text):
        say(f"{file} has `{found[1]}`: from there the job runs no files of the snapshot")
    chosen = options(text)
    words = [*chosen, f"./{file}" if file[0] == "-" else file, *args]
    folders = (os.path.dirname(word.partition("=../../")[2]) for word in chosen)
    snapshot.outputs += [folder for folder in folders if folder and "%" not in folder]  # Slurm makes none
    name = snapshot.name if dry else machine.place(snapshot)
    machine.show(f"cd {shlex.quote(f'{machine.folder}/.rankup/{name}')} && {shlex.join(['sbatch', *words])}")
    if dry:
        return FINISHED
    try:
        answer, stopped = uninterrupted(lambda: machine.do("sbatch", name, *words))
    except ExpectedError as error:
        raise UserError(f"{file}: Slurm must accept the job, got: {error}") from None
    job, _, shown = answer.decode().partition("\n")
    found = re.search(r"(?m)^ *StdOut=(.*)", shown)  # the path may have spaces
    output = re.sub(r"%[jJA]", job, os.path.normpath(found[1])) if found else f"{machine.folder}/slurm-{job}.out"
    say(f"job {job} of snapshot {name} writes to {output}")
    ssh, host = (f"ssh {machine.host} ", f" --host {machine.given}") if machine.host else ("", "")
    advice = f"Look: rankup status{host}. Stop: {ssh}scancel {job}. Come back: {ssh}tail -n +1 -F {shlex.quote(output)}"
    if stopped or not follow or "ArrayTaskId=" in shown:
        say(advice)
        return FINISHED
    try:
        return _follow(machine, job, name, output)
    except KeyboardInterrupt:
        say(f"job {job} goes on. {advice}")
        return FINISHED
    except ExpectedError as error:
        raise ExpectedError(f"submit: {error} Job {job} goes on. {advice}") from None


def _follow(machine: Machine, job: str, name: str, output: str) -> int:
    """Print the job's output until the job is over. Returns its exit code."""
    offset, looks, state, reason, lives = 1, 0, "PENDING", "", True
    while lives:
        lives = state in LIVE  # look once more after the end
        ask = looks < 15 or looks % 5 == 0  # seldom, because all users ask the same slurmctld
        now, _, more = machine.do("look", job, output, str(offset), str(int(ask))).partition(b"\n")
        sys.stdout.buffer.write(more)
        sys.stdout.flush()
        offset, looks = offset + len(more), looks + 1
        if ask and lives:
            state, _, why = now.decode().partition(" ")
            if state == "PENDING" and why not in ("None", reason):
                say(f"job {job} waits: {why}")
            reason = why
        time.sleep(2 if machine.host else 1)
    shown, _, written = machine.do("end", job, name).decode().partition("written=\n")
    code, _, number = fields(shown).get("ExitCode", f"{FAULT}:0").partition(":")
    if written:
        say(f"the job wrote {' '.join(written.split())} into .rankup/{name}/. Write to runs/, which all jobs share")
    ended = int(code) or (128 + int(number) if int(number) else FINISHED if state == "COMPLETED" else FAULT)
    say(f"job {job} is over: {state.lower() or 'Slurm no longer knows it'}, exit code {ended}")
    return ended
