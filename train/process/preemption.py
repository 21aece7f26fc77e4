"""Notices that a cloud is about to take this machine away, as its metadata service gives them. No torch here.

A notice is treated as SIGTERM: the ranks agree on it at the next step, save, and leave with 143. Each cloud is asked at
an address that only the machine itself reaches; the setting `preemption_notices` names the cloud, since no other
program at that address must ever be asked. Sources: the clouds' own documentation of

- AWS: "Spot Instance interruption notices" (two minutes before; asked for every 5 s) and IMDSv2, which wants a token.
- GCP: "Preemptible VM instances" (30 s before) and "Query the metadata server for maintenance event notices".
- Azure: "Scheduled Events for Linux VMs" (30 s before for a Spot VM). It lists other machines of the group, too.
"""

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

EVERY_S = 5.0
ANSWER_S = 2.0
TOKEN_S = 21600  # how long AWS's token is good for, at most
ADDRESS = "http://169.254.169.254"  # of all three; GCP's name for it is metadata.google.internal
# What ends this machine; Freeze is a pause of seconds, and MIGRATE_ON_HOST_MAINTENANCE one of less
AZURE_ENDS = ("Preempt", "Terminate", "Reboot", "Redeploy")


class Metadata:
    """One cloud's metadata service. `address` replaces its own, for tests and for sites that forward it."""

    def __init__(self, cloud: str, address: str = ADDRESS) -> None:
        self.cloud, self.address = cloud, address.rstrip("/")
        # A proxy of the environment would answer for another machine, or give the token away
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._token, self._token_until_s, self._name = "", 0.0, ""

    def notice(self) -> str:
        """What is about to happen to this machine, in the cloud's words; "" as long as nothing is.

        Raises OSError and ValueError where the service does not answer, or not as documented.
        """
        asked: dict[str, Callable[[], str]] = {"aws": self._aws, "gcp": self._gcp, "azure": self._azure}
        return asked[self.cloud]()

    def _aws(self) -> str:
        if time.monotonic() > self._token_until_s:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
            self._token = self._ask("/latest/api/token", headers, method="PUT")
            self._token_until_s = time.monotonic() + TOKEN_S / 2
        try:
            told = self._ask("/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": self._token})
        except urllib.error.HTTPError as error:
            if error.code == 401:  # the token is no longer good
                self._token_until_s = 0.0
            if error.code in (401, 404):  # 404: there is no notice
                return ""
            raise
        found = json.loads(told)
        return f"{found['action']} at {found['time']}"

    def _gcp(self) -> str:
        headers, folder = {"Metadata-Flavor": "Google"}, "/computeMetadata/v1/instance"
        if self._ask(f"{folder}/preempted", headers).strip() == "TRUE":
            return "preempted"
        event = self._ask(f"{folder}/maintenance-event", headers).strip()
        return event if event.startswith("TERMINATE") else ""

    def _azure(self) -> str:
        headers = {"Metadata": "true"}
        if not self._name:
            self._name = self._ask("/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers)
        events: list[dict[str, Any]] = json.loads(
            self._ask("/metadata/scheduledevents?api-version=2020-07-01", headers)
        )["Events"]
        for event in events:
            if event["EventType"] in AZURE_ENDS and self._name in event["Resources"]:
                return f"{event['EventType']} at {event['NotBefore'] or 'once'}"
        return ""

    def _ask(self, path: str, headers: Mapping[str, str], *, method: str = "GET") -> str:
        request = urllib.request.Request(self.address + path, headers=dict(headers), method=method)
        with self._opener.open(request, timeout=ANSWER_S) as answer:
            text: str = answer.read(65536).decode()
        return text


def watch_preemption(cloud: str, *, local_rank: int, say: Callable[[str], None]) -> None:
    """Ask `cloud` for notices from now on, in a thread, until this process ends; "none" asks nobody.

    One rank of each node asks. `say` prints a line, of any rank.
    """
    if cloud == "none" or local_rank != 0:
        return
    metadata = Metadata(cloud, os.environ.get("RANKUP_METADATA_URL", ADDRESS))
    every_s = float(os.environ.get("RANKUP_METADATA_EVERY_S", EVERY_S))
    threading.Thread(target=_watch, args=(metadata, every_s, say), name="preemption", daemon=True).start()


def _watch(metadata: Metadata, every_s: float, say: Callable[[str], None]) -> None:
    warned = False
    while True:
        try:
            if notice := metadata.notice():
                say(f"{metadata.cloud} is about to take this machine away ({notice}): treated as SIGTERM")
                os.kill(os.getpid(), signal.SIGTERM)
                return
        except Exception as error:  # whatever it is, it is no reason to end a training
            if not warned:
                say(
                    f"{metadata.cloud} could not be asked for notices of preemption ({type(error).__name__}: {error}). "
                    "The training goes on, and it is asked again."
                )
            warned = True
        time.sleep(every_s)
