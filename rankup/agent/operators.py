"""What operators ask of a node: a command at the end of the job, a check before the node joins, and the notice by which
a cloud takes a spot machine away. Imports no torch."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from urllib.error import HTTPError

from rankup import timing
from rankup.agent.logs import host_name
from rankup.agent.network import in_thread
from rankup.agent.processes import kill_session, within
from rankup.errors import Stopped
from rankup.places.files import read_json

log = logging.getLogger("rankup")
TOO_LATE = 124  # the code of `timeout`, for a command that did not end in time
METADATA = "http://169.254.169.254"  # AWS, GCP and Azure answer here
LONGEST_ANSWER = 2**20


def run(command: str, *, limit_s: float, given: str = "") -> tuple[int, str]:
    """Run a shell command with `given` on its standard input. Returns its exit code, TOO_LATE if it had to be killed,
    and the last line that it printed."""
    try:
        with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as ended:
            asked.write(given.encode())
            asked.seek(0)
            # The shell notes the code, because an agent reaps all children, also this one
            words = ["sh", "-c", f'(eval "$0"); echo $? > /dev/fd/{ended.fileno()}', command]
            process = subprocess.Popen(
                words, stdin=asked, stdout=said, stderr=said, pass_fds=[ended.fileno()], start_new_session=True
            )
            late = False
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                late = True
            kill_session(process.pid)  # also what the command has left behind
            process.wait()
            for file in (said, ended):
                file.seek(0)
            lines, code = said.read().decode(errors="replace").split("\n"), ended.read()
            last = next((line.strip() for line in reversed(lines) if line.strip()), "")
            return TOO_LATE if late else int(code or 137), last[:300]
    except OSError as error:  # no memory for a process, a full disk
        return 126, str(error)


def tell_end(
    command: str, run_dir: Path, *, code: int, cause: str, began_s: float, requeued: bool = False,
    limit_s: float = timing.ON_END_S,
) -> None:
    """Run the command of --on-end with a line of JSON. Whatever it does, the job has ended as it has. `began_s`: when
    the job began, by time.monotonic(). `requeued`: a scheduler starts the job again."""
    if not command:
        return
    read = within(timing.LAST_MESSAGE_S, lambda: _last_words(run_dir)) or {}  # the disk may hang
    line = json.dumps({
        "run": run_dir.name, "code": code, "cause": cause or (read.get("why", "") if code else ""),
        "step": read.get("step", 0), "host": host_name(), "seconds": round(time.monotonic() - began_s, 1),
        "requeued": requeued,
    })
    ended, last = run(command, limit_s=limit_s, given=f"{line}\n")
    why = f"did not end within {limit_s:g} s and was killed" if ended == TOO_LATE else f"ended with {ended}"
    if ended:
        log.warning("--on-end: the command %s%s", why, f": {last}" if last else "")
    elif last:
        log.info("--on-end: %s", last)


def _last_words(run_dir: Path) -> dict[str, Any]:
    """Return `why` of the run's newest end, and the `step` of its newest report."""
    reports = [read_json(path) for path in run_dir.glob("status/*/progress-*.json")]
    newest = max(reports, key=lambda report: float(report.get("time", 0.0)), default={})
    return {"why": read_json(run_dir / "status.json").get("why", ""), "step": newest.get("step", 0)}


# Is this node fit? ----------------------------------------------------------------------------------------------------


def problem(command: str) -> str:
    """Return why this node is not fit, by the command of --health-check, or ""."""
    code, last = run(command, limit_s=timing.CHECK_S)
    if not code:
        return ""
    why = f"did not end within {timing.CHECK_S:g} s" if code == TOO_LATE else f"ended with {code}"
    return f"--health-check {why}{f': {last}' if last else ''}"


def wait_until_fit(command: str) -> None:
    """Return once the command of --health-check ends with 0. Raises Stopped at SIGTERM."""

    def stop(*_: Any) -> NoReturn:
        raise Stopped("SIGTERM: this node was not fit, and has not joined the job.")

    before, said = signal.signal(signal.SIGTERM, stop), ""
    try:
        while why := problem(command):
            if why != said:
                log.warning("this node is not fit and waits: %s. It is checked every %g s", why, timing.CHECK_AGAIN_S)
            said = why
            time.sleep(timing.CHECK_AGAIN_S)
    finally:
        signal.signal(signal.SIGTERM, before)
    if said:
        log.info("this node is fit now, and joins")


# Spot machines --------------------------------------------------------------------------------------------------------


class Metadata:
    """The metadata server of a cloud. RANKUP_METADATA_URL is its address, where a proxy or a test has another one."""

    def __init__(self) -> None:
        self._url = os.environ.get("RANKUP_METADATA_URL", METADATA).rstrip("/")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by a proxy of the web
        self._clouds = [self._aws, self._gcp, self._azure]  # until one has answered

    def notice(self) -> str:
        """Return in words that the cloud takes this machine away, or "". Raises OSError if no cloud answers."""
        for cloud in self._clouds:
            try:
                found = cloud()
            except (OSError, ValueError, LookupError, TypeError):
                continue
            self._clouds = [cloud]
            return found
        raise OSError("no metadata server")

    def _get(self, path: str, *, method: str = "GET", **headers: str) -> str:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self._url + path, method=method, headers=named)
        with self._opener.open(request, timeout=timing.CONNECT_S) as answer:
            return str(answer.read(LONGEST_ANSWER).decode())

    def _aws(self) -> str:
        # IMDSv2: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
        token = self._get("/latest/api/token", method="PUT", X_aws_ec2_metadata_token_ttl_seconds="60")
        try:
            said = json.loads(self._get("/latest/meta-data/spot/instance-action", X_aws_ec2_metadata_token=token))
        except HTTPError as error:
            if error.code == 404:  # nothing is planned
                return ""
            raise
        return f"AWS will {said['action']} this machine at {said['time']}"

    def _gcp(self) -> str:
        # https://cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption
        said = self._get("/computeMetadata/v1/instance/preempted", Metadata_Flavor="Google").strip()
        if said not in ("TRUE", "FALSE"):
            raise ValueError(said)
        return "GCP preempts this machine" if said == "TRUE" else ""

    def _azure(self) -> str:
        # https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
        name = self._get("/metadata/instance/compute/name?api-version=2021-02-01&format=text", Metadata="true")
        said = self._get("/metadata/scheduledevents?api-version=2020-07-01", Metadata="true")
        for event in json.loads(said)["Events"]:
            if event["EventType"] in ("Preempt", "Terminate") and name.strip() in event["Resources"]:
                return f"Azure plans {event['EventType']} for this machine, not before {event['NotBefore']}"
        return ""


async def watch_spot(leave: Callable[[], None]) -> None:
    """Call `leave` once the cloud says that it takes this machine away."""
    server, answered, said = Metadata(), False, False
    while True:
        try:
            if why := await in_thread(server.notice):
                log.warning("%s: this node leaves as after SIGTERM", why)
                leave()
                return
            answered = True
        except OSError:
            if not (answered or said):
                said = True
                log.warning("--spot: no metadata server of AWS, GCP or Azure answers, so no notice can come. In a "
                            "container on AWS the hop limit of the metadata must be 2")
        await asyncio.sleep(timing.SPOT_S)
