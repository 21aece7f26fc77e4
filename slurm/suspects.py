# Which hosts the lost ranks of a job were on, and which of them its next start shall not get; for supervise.py.
# Run: nothing, supervise.py imports it.
# Edit: nothing.
"""A host that was suspected twice is left out of a requeue, as long as enough other nodes are there.

In any Python from 3.8 on, and with the standard library only. What was suspected stands in `.slurm-suspects` of the
run's folder: a requeue starts a new process on, perhaps, another node.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from job import Job, output, say

TWICE = 2
USABLE = "idle,alloc,mix,comp"  # states of nodes that run jobs or soon may


def note(job: Job, run_dir: Path, rank: int) -> None:
    """The others suspect this rank: count it for its host. Slurm places ranks by blocks, as many on each node."""
    if not 0 <= rank < len(job.hosts) * job.nproc:
        return
    counts = _read(run_dir)["suspected"]
    host = job.hosts[rank // job.nproc]
    counts[host] = counts.get(host, 0) + 1
    say(f"rank {rank} was lost on {host}, suspected {counts[host]} times by now")
    _write(run_dir, suspected=counts)


def exclude(job: Job, run_dir: Path) -> None:
    """Have Slurm leave out the hosts that were suspected twice, for the start that was just queued.

    Only while the job is pending does Slurm take a change of its nodes. Those that the user excludes stay excluded.
    """
    found = _read(run_dir)
    ours = sorted(host for host, times in found["suspected"].items() if times >= TWICE)
    if not ours and not found["excluded"]:
        return
    shown = output("scontrol", "show", "job", job.name)
    listed = re.search(r"ExcNodeList=(\S+)", shown)
    named = listed[1] if listed and listed[1] != "(null)" else ""
    before = output("scontrol", "show", "hostnames", named).split() if named else []
    theirs = [host for host in before if host not in found["excluded"]]
    partition = re.search(r"Partition=(\S+)", shown)
    words = ["--partition", partition[1]] if partition else []
    usable = set(output("sinfo", "-h", "-N", "-o", "%N", "-t", USABLE, *words).split())
    if len(usable - {*theirs, *ours}) < job.num_nodes:
        say(f"{' '.join(ours)}: suspected twice, but not excluded: fewer than {job.num_nodes} other nodes are there")
        ours = []
    nodes = ",".join([*theirs, *ours])
    if subprocess.run(["scontrol", "update", f"JobId={job.name}", f"ExcNodeList={nodes}"]).returncode != 0:
        say("the nodes to exclude could not be changed: the next start may get any")
        return
    if ours:
        say(f"the next start excludes {' '.join(ours)}, suspected twice: scontrol update JobId={job.name} "
            f"ExcNodeList={','.join(theirs)} gives that up")
    _write(run_dir, excluded=ours)


def _read(run_dir: Path) -> dict:
    try:
        found = json.loads((run_dir / ".slurm-suspects").read_text())
        return {"suspected": dict(found["suspected"]), "excluded": list(found["excluded"])}
    except (OSError, ValueError, LookupError, TypeError):
        return {"suspected": {}, "excluded": []}


def _write(run_dir: Path, **changed: object) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / ".slurm-suspects").write_text(json.dumps({**_read(run_dir), **changed}) + "\n")
