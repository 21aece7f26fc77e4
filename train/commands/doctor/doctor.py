"""Is this machine, and this group of machines, fit to train? In stages, each bounded and each printed as it ends.

Alone on a node, or under any launcher over all ranks, with the settings of the training that is to run. What every rank
found comes together on rank 0; where the ranks can't come together, each says what it saw.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from train.commands.doctor import group_checks
from train.config import Config
from train.errors import JoinError, LaunchError, PeerLost, Stopped, UserError, reason
from train.group.connectivity import HINT
from train.group.ends import EndReporter
from train.group.group import Group
from train.group.join import check_devices, form, meet, starting, try_routes
from train.group.members import ranges
from train.group.network import explain_connection, interface_of, is_own_address, try_connect
from train.process import env, machine_checks
from train.process.env import Launch
from train.process.exit import within
from train.process.findings import (
    CODES,
    INCOMPLETE,
    NOTE,
    OK,
    UNFIT,
    VERDICTS,
    WARNING,
    Finding,
    as_json,
    exit_code,
    line,
    merge,
)
from train.process.log import Log
from train.process.status_file import StatusFile
from train.process.stop import StopRequest

NAME_S, DISK_S = 10.0, 30.0  # a resolver and a network disk may never answer
STAGE_S = 60.0  # of all ranks together; more where there are many


def doctor(config: Config, launch: Launch, *, run_dir: Path, log: Log, stop: StopRequest, as_json: bool = False) -> int:
    """Look at everything that `train` with these settings would need, and return the exit code: 0 fit, 10 fit with warnings,
    20 not fit, 30 could not be completed. With `as_json` one line of JSON takes the place of the table on rank 0."""
    doctor = _Doctor(config, launch, run_dir, log, stop, out=sys.stdout if as_json else None)
    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):  # JSON alone goes to standard output
        return doctor.run()


def refuse(error: UserError, log: Log, *, as_json: bool) -> int:
    """The report where already the environment describes no launch that could work."""
    why = "no process group can come of it."
    findings = [Finding("environment", UNFIT, text, why, "", 0, log.host) for text in str(error).splitlines()]
    _print_json(findings, {}, sys.stdout) if as_json else _print_table(findings, log)
    return CODES[UNFIT]


class _Doctor:
    def __init__(
        self, config: Config, launch: Launch, run_dir: Path, log: Log, stop: StopRequest, *, out: TextIO | None
    ) -> None:
        self.config, self.launch, self.run_dir, self.log, self.stop = config, launch, run_dir, log, stop
        self.out = out  # for JSON
        self.findings: list[Finding] = []
        self.facts: dict[str, Any] = {"world_size": launch.world_size, "hosts": [log.host]}
        self.stage = "environment"
        self.began_s = time.monotonic()
        self._stage_s = min(STAGE_S, config.step_timeout_s) + launch.world_size / 10

    def run(self) -> int:
        self._own()
        try:
            self._approach()
            status = StatusFile(self.run_dir / "doctor", self.launch)
            ends = _Ends(status, self.log, self)
            self.stage = "joined"
            with starting(self.config, self.launch, stop=self.stop, ends=ends, log=self.log) as group:
                self._join(group)
                self._together(group)
        except Stopped:
            raise
        except Exception as error:
            self._add(self._failure(error))
            return self._end_alone(silent=getattr(error, "printed_elsewhere", False))
        return exit_code(self.findings)

    # What this process sees of its own machine -----------------------------------------------------------------

    def _own(self) -> None:
        launch, config = self.launch, self.config
        self._add(Finding("environment", OK, env.describe(launch)))
        for text in launch.warnings:
            self._add(Finding("environment", WARNING, text))
        self._bounded("names", NAME_S, lambda: list(machine_checks.own_name()), "the resolver of this machine gives no answer.")
        self._add(*machine_checks.limits(config, launch), *machine_checks.shared_memory(config), *group_checks.devices(launch))
        where = self.run_dir
        self._bounded("storage", DISK_S, lambda: list(machine_checks.disk(where)), f"{where} is on a disk that does not answer.")

    def _approach(self) -> None:
        """The master: its name, the way to it, its port. Raises JoinError once `join_timeout_s` is over."""
        launch = self.launch
        if launch.world_size == 1 or launch.file:
            return
        host, port = launch.master_addr, launch.master_port
        if launch.rank == 0 and not launch.agent_store:
            own = within(NAME_S, lambda: is_own_address(host))
            if own is False:
                self._add(
                    Finding(
                        "route", WARNING, f"MASTER_ADDR={host} is no address of this machine, where rank 0 runs and listens",
                        "right behind a service or NAT; otherwise the others look for rank 0 elsewhere.",
                        "Set MASTER_ADDR to a name or address of rank 0's machine on all ranks.",
                    )
                )
            return
        deadline_s = time.monotonic() + self.config.join_timeout_s
        while True:
            tried = within(NAME_S, lambda: try_connect(host, port, timeout_s=2.0))
            if tried is not None and tried.problem is None:
                break
            if time.monotonic() > deadline_s:
                self.stage = {"name": "names", "route": "route"}.get(tried.problem or "", "port") if tried else "names"
                silent = f'the name "{host}" gets no answer from the resolver'
                raise JoinError(explain_connection(tried, host, port) if tried else silent)
            time.sleep(0.2)
        self._add(
            Finding("names", OK, f"MASTER_ADDR {host} leads to {tried.master_ip}"),
            Finding("route", OK, f"{interface_of(tried.local_ip) or '?'} ({tried.local_ip}) leads there"),
            Finding("port", OK, f"{host}:{port} accepts connections"),
        )

    # All together ----------------------------------------------------------------------------------------------

    def _join(self, group: Group) -> None:
        """The steps of joining, each followed by what it has shown."""
        if group.world_size > 1:
            meet(self.config, group)
            by_host: dict[str, list[int]] = {}
            for rank, host in enumerate(group.hosts):
                by_host.setdefault(host, []).append(rank)
            self.facts["hosts"] = group.hosts
            self._add(Finding("store", OK, "the rendezvous answers as ours"))
            places = "; ".join(f"{ranges(found)} on {host}" for host, found in by_host.items())
            self._add(Finding("joined", OK, f"all {group.world_size} ranks: {places}"))
            self._add(Finding("versions", OK, f"torch {torch.__version__}, program and settings are the same on all"))
            self.stage = "ways"
            try_routes(group)
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
            route = f"each rank reaches the next over high ports ({interface or 'by host name'})"
            self._add(Finding("ways", OK, route))
            self.stage = "group"
            form(self.config, group)
            self._add(Finding("group", OK, f"the process group is formed ({torch.distributed.get_backend()})"))
            self.stage = "devices"
            check_devices(group)

    def _together(self, group: Group) -> None:
        if group.world_size > 1:
            watch = group.watch
            stages: tuple[tuple[str, Callable[[], Iterable[Finding]]], ...] = (
                ("versions", lambda: group_checks.versions(group)),
                ("collective", lambda: group_checks.collective(group)),
                ("links", lambda: group_checks.links(group, self.facts, lambda: watch.enter("links", self._stage_s))),
                ("ranks", lambda: group_checks.ranks(group, self.facts)),
                ("clocks", lambda: group_checks.clocks(group)),
                ("storage", lambda: group_checks.shared_disk(group, self.run_dir)),
            )
            for stage, look in stages:
                self.stage = stage
                watch.enter(stage, self._stage_s)
                self._add(*look())
        else:
            self._add(Finding("joined", NOTE, "a single process: nothing was looked at that takes several ranks"))
        self.stage = "report"
        group.watch.enter("report", self._stage_s)
        told = [finding for found in group.gather([asdict(f) for f in self.findings]) for finding in found]
        everything = [Finding(**finding) for finding in told]
        if group.is_rank0:
            self._report(everything)
        self.findings = everything  # the verdict is the same on all ranks

    # Saying it -------------------------------------------------------------------------------------------------

    def _bounded(self, stage: str, timeout_s: float, look: Callable[[], list[Finding]], silent: str) -> None:
        found = within(timeout_s, look)
        if found is None:
            seen, remedy = f"no answer within {timeout_s:g} s", "Mend that first: training would hang."
            found = [Finding(stage, INCOMPLETE, seen, silent, remedy)]
        self._add(*found)

    def _add(self, *findings: Finding) -> None:
        for finding in findings:
            own = replace(finding, rank=self.launch.rank, host=self.log.host)
            self.findings.append(own)
            if not self.out:
                self.log.info(line(own))

    def _failure(self, error: Exception) -> Finding:
        """What an end of the joining means."""
        text, stage = str(error), getattr(error, "stage", "") or self.stage
        start = env.how_to_start(self.launch)
        if isinstance(error, PeerLost) and error.nobody_died:  # another rank's time was over before this one's
            return _hang(stage, text)
        if isinstance(error, PeerLost):
            return Finding(stage, UNFIT, text, "a rank that dies takes all others along.", "Read what that rank printed last.")
        if not isinstance(error, UserError | JoinError):
            seen = f"{reason(error)}"
            return Finding(stage, INCOMPLETE, seen, "the check itself failed.", "Run `train` to see the error where it happens.")
        if stage == "joined" and isinstance(error, UserError):
            # Of meeting the others, only what rank 0 found to differ is a user's mistake that is not this rank's own launch
            stage = "port" if isinstance(error, LaunchError) else "versions"
        remedies = {"joined": start, "names": start, "port": start, "store": start, "ways": HINT, "versions": ""}
        why = {
            "versions": "different code or settings give wrong numbers, not errors.",
            "ways": "gloo and nccl connect the ranks to each other, not only to the master.",
        }.get(stage, "without it the ranks wait for each other until their time to join is over.")
        return Finding(stage, UNFIT, text, why, remedies.get(stage, ""))

    def overdue(self, why: str) -> int:
        """A stage took longer than its deadline: print what was found, and return the doctor's own exit code."""
        self._add(_hang(self.stage, why))
        return self._end_alone(silent=False)

    def _end_alone(self, *, silent: bool) -> int:
        """The ranks did not come together, or fell apart: each says its own, rank 0 the whole table."""
        if self.out and not silent:
            _print_json(self.findings, self._facts(), self.out)
        elif self.launch.rank == 0:
            self._print_verdict(self.findings)
        elif not silent:
            _print_table([finding for finding in self.findings if finding.level not in (OK, NOTE)], self.log)
        return exit_code(self.findings)

    def _report(self, everything: list[Finding]) -> None:
        if self.out:
            _print_json(everything, self._facts(), self.out)
        else:
            for finding, ranks in merge(everything):
                if ranks[0] != 0 and finding.level not in (OK, NOTE):  # rank 0's own were printed as they were found
                    self.log.info(line(finding, ranks=f"rank {ranges(ranks)} on {finding.host}"))
            self._print_verdict(everything)
        with contextlib.suppress(OSError):  # the stage of this disk has said so
            path = self.run_dir / "doctor" / "report.json"
            path.write_text(json.dumps(as_json(everything, self._facts()), indent=2) + "\n")

    def _facts(self) -> dict[str, Any]:
        return {**self.facts, "seconds": round(time.monotonic() - self.began_s, 2)}

    def _print_verdict(self, findings: list[Finding]) -> None:
        self.log.info(_verdict(findings, time.monotonic() - self.began_s))


class _Ends(EndReporter):
    """Ends the doctor with its report, where a training would report a lost peer."""

    def __init__(self, status: StatusFile, log: Log, doctor: _Doctor) -> None:
        super().__init__(status, log)
        self._doctor = doctor

    def report_overdue(self, code: int, why: str, suspect: int | None) -> int:
        del code, suspect
        return self._doctor.overdue(why)


def _hang(stage: str, why: str) -> Finding:
    return Finding(stage, INCOMPLETE, why, "in training it would be a hang.", "Look at the rank that is suspected.")


def _verdict(findings: list[Finding], seconds: float) -> str:
    stages = len({finding.stage for finding in findings})
    counts = {level: len(merge(f for f in findings if f.level == level)) for level in (UNFIT, INCOMPLETE, WARNING)}
    told = ", ".join(f"{count} {level}" for level, count in counts.items() if count)
    return f"doctor: {VERDICTS[exit_code(findings)]}{f' ({told})' if told else ''}: {stages} stages in {seconds:.1f} s"


def _print_table(findings: list[Finding], log: Log) -> None:
    for finding in findings:
        log.warning(line(finding))
    log.warning(f"doctor: {VERDICTS[exit_code(findings)]}")


def _print_json(findings: list[Finding], facts: dict[str, Any], out: TextIO) -> None:
    out.write(json.dumps(as_json(findings, facts)) + "\n")
    out.flush()
