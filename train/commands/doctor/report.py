"""What the doctor says: each finding as it is found, then the verdict, as a table or as JSON."""

import contextlib
import json
import logging
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from rankup.agent.logs import host_name
from rankup.env.rank_env import ranges
from train.group.group import Group
from train.process.findings import INCOMPLETE, UNFIT, VERDICTS, WARNING, Finding, exit_code, line, merge
from train.process.status import write_json


class Report:
    """The findings of one rank. `json_out`: where JSON goes, in place of the table; None prints the table."""

    def __init__(self, log: logging.Logger, *, rank: int, world_size: int, json_out: TextIO | None) -> None:
        self.findings: list[Finding] = []
        self.facts: dict[str, Any] = {"world_size": world_size, "hosts": [host_name()]}
        self._log, self._rank, self._json_out = log, rank, json_out
        self._began_s = time.monotonic()

    def add(self, *findings: Finding) -> None:
        """Keep findings of this rank, and print them on rank 0."""
        for finding in findings:
            own = replace(finding, rank=self._rank, host=host_name())
            self.findings.append(own)
            if self._json_out is None:
                self._log.info(line(own))

    def end_together(self, group: Group, path: Path) -> int:
        """Rank 0 prints the verdict of all ranks and writes it to `path`. Collective: every rank calls it.

        Returns the exit code, which is the same on all ranks.
        """
        gathered = group.gather([asdict(finding) for finding in self.findings])
        everything = [Finding(**finding) for part in gathered for finding in part]
        if group.is_rank0:
            if self._json_out is not None:
                self._print_json(everything)
            else:
                for finding, ranks in merge(everything):
                    # Rank 0's own findings were printed as they were found
                    if ranks[0] != 0 and finding.is_problem:
                        self._log.info(line(finding, ranks=f"rank {ranges(ranks)} on {finding.host}"))
                self._print_verdict(everything)
            with contextlib.suppress(OSError):  # a disk that can't be written has its own finding
                write_json(path, self._as_json(everything))
        return exit_code(everything)

    def end_alone(self, *, printed_elsewhere: bool = False) -> int:
        """The ranks did not join, or lost each other: each rank reports its own findings. Returns the exit code.

        `printed_elsewhere`: another rank prints the same failure.
        """
        if self._json_out is not None and not printed_elsewhere:
            self._print_json(self.findings)
        elif self._rank == 0:
            self._print_verdict(self.findings)
        elif not printed_elsewhere:
            self._print_problems()
        return exit_code(self.findings)

    def refuse(self, text: str) -> int:
        """The report if the environment describes no launch that could work. Returns the exit code."""
        why = "no process group can be formed with it."
        self.findings = [Finding("environment", UNFIT, each, why, host=host_name()) for each in text.splitlines()]
        if self._json_out is None:
            self._print_problems()
        else:
            self.facts = {}
            self._print_json(self.findings)
        return exit_code(self.findings)

    def _print_verdict(self, findings: list[Finding]) -> None:
        stages = len({finding.stage for finding in findings})
        counts = {level: len(merge(f for f in findings if f.level == level)) for level in (UNFIT, INCOMPLETE, WARNING)}
        problems = ", ".join(f"{count} {level}" for level, count in counts.items() if count)
        verdict = VERDICTS[exit_code(findings)] + (f" ({problems})" if problems else "")
        self._log.info(f"doctor: {verdict}: {stages} stages in {time.monotonic() - self._began_s:.1f} s")

    def _print_problems(self) -> None:
        # For a rank that has printed nothing so far
        for finding in self.findings:
            if finding.is_problem:
                self._log.warning(line(finding))
        self._log.warning(f"doctor: {VERDICTS[exit_code(self.findings)]}")

    def _print_json(self, findings: list[Finding]) -> None:
        assert self._json_out is not None
        self._json_out.write(json.dumps(self._as_json(findings)) + "\n")
        self._json_out.flush()

    def _as_json(self, findings: list[Finding]) -> dict[str, Any]:
        """The verdict, the facts, and each finding once with its ranks; good ones only where rank 0 has them."""
        code = exit_code(findings)
        facts = {**self.facts, "seconds": round(time.monotonic() - self._began_s, 2)} if self.facts else {}
        kept = []
        for finding, ranks in merge(findings):
            if finding.is_problem or 0 in ranks:
                fields = asdict(finding)
                del fields["rank"]
                kept.append({**fields, "ranks": ranks})
        return {"verdict": VERDICTS[code], "exit_code": code, **facts, "findings": kept}
