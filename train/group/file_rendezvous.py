"""Meeting by a file: rank 0 serves its store on a free port and leaves the address in the file; the others look there."""

import secrets
import time
from pathlib import Path

# torch exports it under a condition that mypy does not follow
from torch.distributed import Store  # type: ignore[attr-defined]

from train.errors import JoinError
from train.group.network import address_of, interfaces, try_connect
from train.group.store import connect_store, open_port, serve_store
from train.process.addresses import is_loopback
from train.process.init_method import Endpoint, leave, look
from train.process.log import Log

ANSWER_S = 10.0  # for a store that is alive
EARLIER_S = 5.0  # rank 0 of the last attempt may still be on its way out


def serve(path: Path, log: Log, *, timeout_s: float) -> tuple[Store, Endpoint]:
    """Start the store, and say in the file where. Raises JoinError where another job is about to meet by this file, and
    LaunchError where the file can't be used."""
    until_s = time.monotonic() + EARLIER_S
    while (earlier := look(path)) is not None:
        if connect(earlier, log.host) is None:
            log.info(f"{path} was left by an earlier run that did not come together: replaced")
            break
        if time.monotonic() > until_s:
            raise JoinError(f"{path} is in use by another job, on {earlier.host}, that is coming together. Name another file.")
        time.sleep(0.1)
    listener = open_port(0)
    assert listener is not None  # any port will do
    addresses = tuple(ip for name in interfaces() if (ip := address_of(name)) and not is_loopback(ip))
    notice = Endpoint(secrets.token_hex(8), log.host, addresses, listener.getsockname()[1])
    store = serve_store(listener, timeout_s=timeout_s)
    store.set(_key(notice), "here")
    leave(path, notice)
    return store, notice


def connect(notice: Endpoint, host: str) -> tuple[Store, str, str] | None:
    """A client of the store that a notice tells of, our address on the way there, and the address that answered; None
    where nobody answers, or somebody who did not write this notice. `host` is this machine's name."""
    for address in (*(("127.0.0.1",) if notice.host == host else ()), *notice.addresses):
        tried = try_connect(address, notice.port, timeout_s=2.0)
        if tried.problem is not None:
            continue
        try:
            store = connect_store(address, notice.port, timeout_s=ANSWER_S)
            if store.check([_key(notice)]):
                return store, tried.local_ip, tried.master_ip
        except RuntimeError:  # torch's own errors: no store, or one that is just ending
            continue
    return None


def _key(notice: Endpoint) -> str:
    return f"file/{notice.token}"
