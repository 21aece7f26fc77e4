"""Is this machine, and this group of machines, fit to train? In stages, each with a time limit and printed as it ends.

Runs alone on a node, or under any launcher over all ranks. Rank 0 collects what every rank found. If the ranks can't
join, each rank prints its own findings.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rankup.agent.protocol import HINT
from rankup.agent.status import StatusFile
from rankup.doctor import group as together
from rankup.doctor.machine import check_machine
from rankup.doctor.report import INCOMPLETE, NOTE, OK, UNFIT, WARNING, Finding, Report
from rankup.env.rank_env import RankEnv, describe, how_to_start, ranges
from rankup.errors import JoinError, PeerLost, Stopped, UserError, reason
from rankup.group.group import Group
from rankup.group.joining import check_devices, check_settings, form, meet, start
from rankup.group.line import Suspect
from rankup.group.stop import StopRequest

STAGE_S = 60.0  # for all ranks together,
STAGE_S_PER_RANK = 0.1  # and more with many


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a training is going to need. `settings`: what must be the same on all ranks, by name. `device`, `backend`:
    as for `rankup.group.joining.join`. `num_threads`, `num_workers`: of each rank. Times in seconds."""

    settings: Mapping[str, str] = field(default_factory=dict)
    device: str | None = None
    backend: str | None = None
    num_threads: int = 1
    num_workers: int = 0
    join_timeout_s: float = 120.0
    stage_timeout_s: float = STAGE_S
    longest_phase_s: float = 1800.0


def doctor(
    found: RankEnv | UserError, run_dir: Path, plan: Plan, *, stop: StopRequest, log: logging.Logger,
    as_json: bool = False,
) -> int:
    """Check everything that a training needs, alone or together with all ranks, and write `doctor/report.json`.

    found: this process's place among the ranks, or why the environment describes none, which is a finding too.
    run_dir: of the run that is planned.
    as_json: rank 0 prints one line of JSON in place of the table.

    Returns the exit code: 0 fit, 10 fit with warnings, 20 not fit, 30 could not be completed. Raises Stopped.
    """
    json_out = sys.stdout if as_json else None
    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
        if isinstance(found, UserError):
            report = Report(log, rank=0, world_size=1, json_out=json_out)
            why, report.facts = "no process group can be formed with it.", {}
            report.add(*(Finding("environment", UNFIT, text, why) for text in str(found).splitlines()))
            return report.end_alone()
        report = Report(log, rank=found.rank, world_size=found.world_size, json_out=json_out)
        return _Doctor(found, run_dir, plan, report, stop, log).run()


class _Doctor:
    """The stages, and which of them this rank is in: a failure is reported as that stage's."""

    def __init__(
        self, launch: RankEnv, run_dir: Path, plan: Plan, report: Report, stop: StopRequest, log: logging.Logger
    ) -> None:
        self.launch, self.run_dir, self.plan = launch, run_dir, plan
        self.report, self.stop, self.log = report, stop, log
        self.stage = "environment"
        self._stage_s = min(STAGE_S, plan.stage_timeout_s) + STAGE_S_PER_RANK * launch.world_size

    def run(self) -> int:
        """All stages. Returns the exit code. Raises Stopped."""
        plan, launch = self.plan, self.launch
        self.report.add(Finding("environment", OK, describe(launch)))
        self.report.add(*(Finding("environment", WARNING, text) for text in launch.warnings))
        check_machine(
            self.report, self.run_dir, ranks=launch.local_world_size or 1, threads=plan.num_threads,
            num_workers=plan.num_workers, has_gpus=not (plan.device or "").startswith("cpu"),
            local_rank=launch.local_rank if launch.world_size > 1 else None, devices=lambda: together.devices(launch),
        )
        try:
            with start(
                launch, settings=plan.settings, device=plan.device, backend=plan.backend,
                status=StatusFile(self.run_dir / "doctor", launch), stop=self.stop, log=self.log, leaving=self._leave,
            ) as group:
                self._check(group, "repetition", together.repetition(group.device))
                if group.world_size > 1:
                    self._join(group)
                    self._check(group, "versions", together.versions(group))
                    self._check(group, "collective", together.collective(group))
                    self._check(group, "links", together.links(group, self.report.facts))
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

    # All ranks together ----------------------------------------------------------------------------------------

    def _join(self, group: Group) -> None:
        """The three steps of joining, each followed by what it has shown."""
        add, self.stage = self.report.add, "joined"
        meet(group, timeout_s=self.plan.join_timeout_s)
        ranks_by_host: dict[str, list[int]] = {}
        for rank, host in enumerate(group.hosts):
            ranks_by_host.setdefault(host, []).append(rank)
        self.report.facts["hosts"] = list(group.hosts)
        places = "; ".join(f"{ranges(found)} on {host}" for host, found in ranks_by_host.items())
        add(Finding("joined", OK, f"all {group.world_size} ranks: {places}"))
        interface = os.environ.get("GLOO_SOCKET_IFNAME") or "by host name"
        add(Finding("connectivity", OK, f"each rank reaches the next over high ports ({interface})"))
        self.stage = "group"
        form(group, timeout_s=self.plan.join_timeout_s, longest_phase_s=self.plan.longest_phase_s)
        add(Finding("group", OK, f"the process group is formed ({torch.distributed.get_backend()})"))
        self.stage = "versions"
        check_settings(group)
        add(Finding("versions", OK, f"torch {torch.__version__}, program and settings are the same on all"))
        self.stage = "devices"
        check_devices(group)

    def _check(self, group: Group, stage: str, findings: Iterator[Finding]) -> None:
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
        if isinstance(error, PeerLost):  # or another rank's deadline passed before this one's
            return (_hang if error.nobody_died else _death)(self.stage, str(error))
        if isinstance(error, UserError | JoinError):
            # Most say themselves what to do. Who looks for a missing rank asks the launcher
            remedy = how_to_start(self.launch) if isinstance(error, JoinError) and HINT not in str(error) else ""
            return Finding(self.stage, UNFIT, str(error), "a training ends here too.", remedy)
        return Finding(self.stage, INCOMPLETE, reason(error), "the check itself failed.",
                       "Start the training to see the error where it happens.")


def _death(stage: str, why: str) -> Finding:
    return Finding(stage, UNFIT, why, "a rank that dies ends all others.", "Read what that rank printed last.")


def _hang(stage: str, why: str) -> Finding:
    return Finding(stage, INCOMPLETE, why, "in training it would be a hang.", "Look at the suspected rank.")
