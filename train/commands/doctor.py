"""Is this machine, and this group of machines, fit to train? In stages, each with a time limit and printed as it ends.

Runs alone on a node, or under any launcher over all ranks, with the settings of the training that is planned. Rank 0
collects what every rank found. If the ranks can't join, each rank prints its own findings.
"""

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from rankup.agent.attendance import NO_ROUTE, explain
from rankup.agent.meeting import HINT
from rankup.agent.network import foreign_address
from rankup.agent.processes import within
from rankup.agent.protocol import Link, interface_of
from rankup.agent.status import StatusFile
from rankup.doctor import gpus, machine
from rankup.doctor import group as together
from rankup.doctor.report import INCOMPLETE, NOTE, OK, UNFIT, WARNING, Finding, Report
from rankup.env.rank_env import check_loopback, describe, how_to_start, ranges
from rankup.errors import JoinError, LaunchError, PeerLost, Stopped, UserError, reason
from rankup.group.group import Group
from rankup.group.joining import check_devices, check_settings, form, meet, start
from rankup.group.line import Suspect
from train.commands.context import Context
from train.config import check_world_size
from train.config.options import DoctorOptions
from train.group import backend_of, device_of, longest_phase_s, same_settings

NAME_S, DISK_S = 10.0, 30.0  # a resolver and a network disk may never answer,
GPU_S = 60.0  # nor a driver whose GPU hangs; one that nobody keeps loaded takes seconds for each GPU
STAGE_S = 60.0  # for all ranks together,
STAGE_S_PER_RANK = 0.1  # and more with many


def doctor(context: Context, options: DoctorOptions) -> int:
    """Check everything that `train` with these settings would need.

    Returns the exit code: 0 fit, 10 fit with warnings, 20 not fit, 30 could not be completed. With `as_json` rank 0
    prints one line of JSON in place of the table. Raises Stopped.
    """
    config, log = context.config, context.log
    json_out = sys.stdout if options.as_json else None
    with contextlib.redirect_stdout(sys.stderr if options.as_json else sys.stdout):
        try:
            launch = context.launch
            check_loopback(launch, config.simulated_nodes)
            check_world_size(config, launch.world_size)
        except UserError as error:
            # The environment describes no launch that could work: that is a finding too
            return Report(log, rank=0, world_size=1, json_out=json_out).refuse(str(error))
        report = Report(log, rank=launch.rank, world_size=launch.world_size, json_out=json_out)
        return _Doctor(context, report).run()


class _Doctor:
    """The stages, and which of them this rank is in: a failure is reported as that stage's."""

    def __init__(self, context: Context, report: Report) -> None:
        self.config, self.launch, self.run_dir = context.config, context.launch, context.run_dir
        self.log, self.stop, self.report = context.log, context.stop, report
        self.stage = "environment"
        self._stage_s = min(STAGE_S, self.config.step_timeout_s) + STAGE_S_PER_RANK * self.launch.world_size

    def run(self) -> int:
        """All stages. Returns the exit code. Raises Stopped."""
        self._check_machine()
        try:
            self._check_master()
            self.stage = "joined"
            with start(
                self.launch, settings=same_settings(self.config), device=device_of(self.config),
                backend=backend_of(self.config), status=StatusFile(self.run_dir / "doctor", self.launch),
                stop=self.stop, log=self.log, leaving=self._leave,
            ) as group:
                if group.world_size > 1:
                    self._join(group)
                    self._check_group(group)
                else:
                    seen = "a single process: nothing was checked that needs several ranks"
                    self.report.add(Finding("joined", NOTE, seen))
                self.stage = "report"
                group.watch.enter("report", self._stage_s)
                return self.report.end_together(group.gather, self.run_dir / "doctor" / "report.json")
        except Stopped:
            raise
        except Exception as error:
            self.report.add(self._explain(error))
            return self.report.end_alone(printed_elsewhere=getattr(error, "printed_elsewhere", False))

    # What this process sees of its own machine -----------------------------------------------------------------

    def _check_machine(self) -> None:
        add, launch, config = self.report.add, self.launch, self.config
        add(Finding("environment", OK, describe(launch)))
        add(*(Finding("environment", WARNING, text) for text in launch.warnings))
        self._bounded("names", NAME_S, machine.own_name, "the resolver of this machine gives no answer.")
        add(*machine.limits(ranks=launch.local_world_size or 1, threads=config.num_threads))
        add(*machine.shared_memory(num_workers=config.num_workers))
        if not config.device.startswith("cpu"):
            own = launch.local_rank if launch.world_size > 1 else None
            self._bounded("gpus", GPU_S, lambda: gpus.gpus(own), "the driver of the GPUs gives no answer.")
        add(*together.devices(launch))
        silent = f"{self.run_dir} is on a disk that does not answer."
        self._bounded("storage", DISK_S, lambda: machine.disk(self.run_dir), silent)

    def _bounded(self, stage: str, timeout_s: float, check: Callable[[], Iterable[Finding]], silent: str) -> None:
        found = within(timeout_s, lambda: list(check()))
        if found is None:
            remedy = "Correct that first: training would hang."
            found = [Finding(stage, INCOMPLETE, f"no answer within {timeout_s:g} s", silent, remedy)]
        self.report.add(*found)

    def _check_master(self) -> None:
        """The master: its name, the route to it, its port. Raises JoinError after `join_timeout_s`."""
        launch = self.launch
        host, port = launch.master_addr, launch.master_port
        if launch.world_size == 1 or launch.file:
            return
        if launch.rank == 0 and not launch.agent_store:
            # Rank 0 is the master itself: nothing listens there yet
            if seen := asyncio.run(foreign_address(host)):
                remedy = "Set MASTER_ADDR to a name or address of rank 0's machine on all ranks."
                self.report.add(Finding("route", WARNING, seen, "the others may look for rank 0 elsewhere.", remedy))
            return
        deadline_s = time.monotonic() + self.config.join_timeout_s
        while isinstance(tried := _connect(host, port), OSError):
            if time.monotonic() > deadline_s:
                unreached = tried.errno in NO_ROUTE
                self.stage = "names" if isinstance(tried, socket.gaierror) else "route" if unreached else "port"
                raise JoinError(explain(tried, host, port))
            time.sleep(0.2)
        local_ip, master_ip = tried
        self.report.add(
            Finding("names", OK, f"MASTER_ADDR {host} leads to {master_ip}"),
            Finding("route", OK, f"{interface_of(local_ip) or '?'} ({local_ip}) leads there"),
            Finding("port", OK, f"{host}:{port} accepts connections"),
        )

    # All ranks together ----------------------------------------------------------------------------------------

    def _join(self, group: Group) -> None:
        """The three steps of joining, each followed by what it has shown."""
        add = self.report.add
        meet(group, timeout_s=self.config.join_timeout_s)
        ranks_by_host: dict[str, list[int]] = {}
        for rank, host in enumerate(group.hosts):
            ranks_by_host.setdefault(host, []).append(rank)
        self.report.facts["hosts"] = list(group.hosts)
        places = "; ".join(f"{ranges(found)} on {host}" for host, found in ranks_by_host.items())
        add(Finding("store", OK, "the rendezvous answers as ours"))
        add(Finding("joined", OK, f"all {group.world_size} ranks: {places}"))
        interface = os.environ.get("GLOO_SOCKET_IFNAME") or "by host name"
        add(Finding("connectivity", OK, f"each rank reaches the next over high ports ({interface})"))
        self.stage = "group"
        form(group, timeout_s=self.config.join_timeout_s, longest_phase_s=longest_phase_s(self.config))
        add(Finding("group", OK, f"the process group is formed ({torch.distributed.get_backend()})"))
        self.stage = "versions"
        check_settings(group)
        add(Finding("versions", OK, f"torch {torch.__version__}, program and settings are the same on all"))
        self.stage = "devices"
        check_devices(group)

    def _check_group(self, group: Group) -> None:
        facts = self.report.facts
        # The deadline of the links begins anew after each round of them
        checks: dict[str, Iterator[Finding]] = {
            "versions": together.versions(group),
            "collective": together.collective(group),
            "links": together.links(group, facts, after_round=lambda: group.watch.enter("links", self._stage_s)),
            "ranks": together.ranks(group, facts),
            "clocks": together.clocks(group),
            "storage": together.shared_disk(group, self.run_dir, token=group.attempt),
        }
        for stage, findings in checks.items():
            self.stage = stage
            group.watch.enter(stage, self._stage_s)
            self.report.add(*findings)  # a generator: the check runs here

    def _leave(self, code: int, why: str, suspect: Suspect | None) -> int:
        """A training would end here with `code`: a deadline has passed, or a peer is lost."""
        gone = suspect is not None and not suspect.alive
        self.report.add((_death if gone else _hang)(self.stage, why))
        return self.report.end_alone()

    def _explain(self, error: Exception) -> Finding:
        """The finding that an error of the current stage means."""
        text, stage = str(error), getattr(error, "stage", "") or self.stage
        if isinstance(error, PeerLost):  # or another rank's deadline passed before this one's
            return (_hang if error.nobody_died else _death)(stage, text)
        if not isinstance(error, UserError | JoinError):
            return Finding(stage, INCOMPLETE, reason(error), "the check itself failed.",
                           "Run `train` to see the error where it happens.")
        if stage == "joined" and isinstance(error, UserError):
            # Two mistakes of the user show while ranks meet: a port that can't be used, and ranks that differ
            stage = "port" if isinstance(error, LaunchError) else "versions"
        if stage == "joined" and HINT in text:
            stage = "connectivity"
        why = "without it the ranks wait for each other until their time to join is over."
        remedy = how_to_start(self.launch) if stage in ("joined", "names", "port", "store") else ""
        if stage == "versions":
            why = "different code or settings give wrong numbers, not errors."
        elif stage == "connectivity":
            why, remedy = "gloo and nccl connect the ranks to each other, not only to the master.", HINT
        return Finding(stage, UNFIT, text, why, remedy)


def _connect(host: str, port: int) -> tuple[str, str] | OSError:
    """Connect once and close. Returns both addresses, or why that failed."""
    async def connect() -> tuple[str, str]:
        link = await Link.connect(host, port)
        link.close()
        return link.local_ip, link.remote_ip

    try:
        return asyncio.run(connect())
    except OSError as error:
        return error


def _death(stage: str, why: str) -> Finding:
    return Finding(stage, UNFIT, why, "a rank that dies ends all others.", "Read what that rank printed last.")


def _hang(stage: str, why: str) -> Finding:
    return Finding(stage, INCOMPLETE, why, "in training it would be a hang.", "Look at the suspected rank.")
