"""Tells Kubeflow Trainer how far a training is: `kubectl get trainjob NAME -o jsonpath={.status.trainerStatus}`.

Trainer from v2.2 on, with its feature gate TrainJobStatus, gives the containers of a TrainJob an address, the
certificate to check it by, and a token (KEP-2779). Others may read what is sent: it is the progress and the newest
metrics. No torch here.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ADDRESS = "KUBEFLOW_TRAINER_SERVER_URL"
CERTIFICATE = "KUBEFLOW_TRAINER_SERVER_CA_CERT"  # a file
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # a file, whose content is replaced within the hour
EVERY_S = 10.0  # each update is a write to the cluster's database. Kubeflow asks for 5 s or more between two
ANSWER_S = 5.0
LAST_S = 3.0  # how long the end of a training may wait until its last progress is sent
# The schema of a TrainJob refuses longer ones, and with them the whole update
LONGEST, MOST_METRICS = 64, 256


class PlatformStatus:
    """Sends from a thread of its own, so that an address that does not answer delays nothing."""

    def __init__(self, address: str, *, certificate: str, token: str, warn: Callable[[str], None]) -> None:
        """`certificate`, `token`: the files; without a certificate the system's are trusted. `warn`: prints a line."""
        self.address, self.certificate, self.token, self.warn = urlsplit(address), certificate, token, warn
        self._newest: dict[str, Any] | None = None
        self._closing = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._send, name="platform", daemon=True)
        self._thread.start()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], *, warn: Callable[[str], None]) -> "PlatformStatus | None":
        """None where no platform has asked."""
        if not environ.get(ADDRESS):
            return None
        return cls(
            environ[ADDRESS], certificate=environ.get(CERTIFICATE, ""), token=environ.get(TOKEN, ""), warn=warn
        )

    def tell(
        self, *, step: int, total_steps: int, finished: bool, remaining_s: float | None, metrics: Mapping[str, float]
    ) -> None:
        """Have this sent soon, in place of what was not sent yet. Returns at once."""
        # All steps are done a while before all is saved and written
        percent = 100 if finished else min(99, 100 * step // max(total_steps, 1))
        status: dict[str, Any] = {
            "progressPercentage": percent, "lastUpdatedTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "metrics": [
                {"name": name[:LONGEST], "value": f"{value:.6g}"} for name, value in [*metrics.items()][:MOST_METRICS]
            ],
        }
        if remaining_s is not None:
            status["estimatedRemainingSeconds"] = round(remaining_s)
        self._newest = {"trainerStatus": status}

    def close(self) -> None:
        """Send the last word, if that takes no longer than LAST_S."""
        self._closing.set()
        self._thread.join(LAST_S)

    def _send(self) -> None:
        sent = None
        closing = False
        while not closing:
            closing = self._closing.wait(EVERY_S if sent is not None else 1.0)
            newest = self._newest
            if newest is None or newest is sent:
                continue
            sent = newest
            try:
                self._post(newest)
            except Exception as error:  # whatever it is, it is no reason to end a training
                if not self._warned:
                    self.warn(
                        f"the progress could not be sent to {self.address.hostname} ({type(error).__name__}: {error}). "
                        "The training goes on, and later ones are tried."
                    )
                self._warned = True

    def _post(self, body: dict[str, Any]) -> None:
        """Raises OSError and ValueError, with texts that never hold the token."""
        import http.client  # here, as few trainings need them, and all would pay 30 ms for them at their start
        import ssl

        if self.address.scheme != "https" or not self.address.hostname:
            raise ValueError(f"{ADDRESS} must begin with https://")
        # Read anew each time, as it is replaced while the training runs
        token = Path(self.token).read_text(encoding="utf-8").strip()
        if not re.fullmatch(r"[!-~]+", token):  # http.client would quote it in its error
            raise ValueError(f"{self.token} holds no token")
        context = ssl.create_default_context(cafile=self.certificate or None)
        # From 3.13 on Python also refuses certificates without fields that the cluster's own do not always have. Chain
        # and name are checked all the same.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        # Not urllib: it would send the token through a proxy of the environment, and to where a redirect points
        connection = http.client.HTTPSConnection(
            self.address.hostname, self.address.port, timeout=ANSWER_S, context=context
        )
        try:
            connection.request("POST", self.address.path, json.dumps(body), {
                "Authorization": f"Bearer {token}", "Content-Type": "application/json",
            })
            answer = connection.getresponse()
            if answer.status != 200:
                raise OSError(f"answered {answer.status} {answer.reason}")
        finally:
            connection.close()
