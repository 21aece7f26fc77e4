"""The last word of a container: one line in the file that Kubernetes shows once it has ended. No torch here.

`kubectl describe pod` shows it as the message of the terminated container, and the pod's status keeps it. The manifests
in k8s/ name that file in RANKUP_LAST_WORD; elsewhere nothing is written.
"""

import contextlib
import os
from pathlib import Path

from rankup.errors import FINISHED, JOIN_FAILED, PEER_LOST

LONGEST = 2000  # bytes; the kubelet keeps the last 4096


def tell_platform(text: str, code: int) -> None:
    """Write why a process of this container ends with `code`, as one line over what stands there.

    A rank that only lost another one does not hide what the other said, which may be in the same container.
    """
    if not (name := os.environ.get("RANKUP_LAST_WORD")):
        return
    path, victim = Path(name), code in (JOIN_FAILED, PEER_LOST)
    line = " ".join(f"{text} (exit code {code})".split()).encode()[:LONGEST].decode(errors="ignore")
    with contextlib.suppress(OSError):  # it is no reason to end in another way
        if not (victim and path.read_text(encoding="utf-8", errors="ignore")):
            path.write_text("" if code == FINISHED else f"{line}\n", encoding="utf-8")
