"""Meeting by a file: rank 0 serves its store on a free port, and leaves the address in the file for the others."""

import contextlib
import json
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from rankup.env.addresses import is_loopback
from rankup.errors import JoinError, LaunchError
from train.group import keys
from train.group.network import Connection, address_of, interfaces, try_connect
from train.group.store import connect_store, open_port, serve_store
from train.group.waiting import Wait
from train.process.atomic_file import write_atomically

ANSWER_S = 10.0  # for a store that is alive
STUCK = "somebody at the address in {} accepts connections and does not answer. Remove the file"
EARLIER_S = 5.0  # rank 0 of the last attempt may still be on its way out


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What rank 0 writes into the file: where its store listens, and a token that only this store knows."""

    token: str
    host: str
    addresses: list[str]
    port: int


def serve(wait: Wait) -> tuple[Store, Endpoint]:
    """Start the store, and publish where. Raises JoinError where another job is about to meet by this file, and
    LaunchError where the file can't be used."""
    path, log = Path(wait.launch.file), wait.log
    wait.stuck_in = STUCK.format(wait.address)
    until_s = time.monotonic() + EARLIER_S
    while (earlier := read_endpoint(path)) is not None:
        if _client_of(earlier, log.host) is None:
            log.info(f"{path} was left by an earlier run that did not come together: replaced")
            break
        if time.monotonic() > until_s:
            raise JoinError(
                f"{path} is in use by another job, on {earlier.host}, that is coming together. Name another file."
            )
        time.sleep(0.1)
    listener = open_port(0)
    assert listener is not None  # any port will do
    addresses = [ip for name in interfaces() if (ip := address_of(name)) and not is_loopback(ip)]
    endpoint = Endpoint(secrets.token_hex(8), log.host, addresses, listener.getsockname()[1])
    store = serve_store(listener, wait)
    store.set(keys.endpoint(endpoint.token), "here")
    publish_endpoint(path, endpoint)
    return store, endpoint


def connect(wait: Wait) -> tuple[TCPStore, Connection]:
    """A client of the store whose address is in the file, and the route there. Raises JoinError.

    The file is read again until rank 0 has written its own address: an earlier run may have left another.
    """
    path = Path(wait.launch.file)
    wait.stuck_in = STUCK.format(wait.address)
    while True:
        endpoint = read_endpoint(path)
        if endpoint is not None and (client := _client_of(endpoint, wait.log.host)):
            return client
        wait.problem = f"rank 0 has not left its address in {path}"
        if endpoint is not None:
            wait.problem += (
                f"; what is there was left on {endpoint.host} by an earlier run, or no route leads to "
                f"{', '.join(endpoint.addresses) or 'it'} port {endpoint.port}"
            )
        if wait.over:
            raise wait.failure(wait.problem)
        wait.pause()


def _client_of(endpoint: Endpoint, host: str) -> tuple[TCPStore, Connection] | None:
    """A client of the store at that endpoint, or None where nobody answers, or another store than the one that
    published it (its port may be another job's by now). `host`: this machine's name."""
    for address in (*(("127.0.0.1",) if endpoint.host == host else ()), *endpoint.addresses):
        tried = try_connect(address, endpoint.port, timeout_s=2.0)
        if tried.problem is not None:
            continue
        try:
            store = connect_store(address, endpoint.port, timeout_s=ANSWER_S)
            if store.check([keys.endpoint(endpoint.token)]):
                return store, tried
        except RuntimeError:  # torch's own errors: no store, or one that is just ending
            continue
    return None


# The file ------------------------------------------------------------------------------------------------------------


def read_endpoint(path: Path) -> Endpoint | None:
    """The endpoint in the file; None where there is none yet. Raises LaunchError where something else is in it."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LaunchError(f"--init-method: {path} must be readable, got {error.strerror}.") from None
    if not text:  # as mktemp makes it
        return None
    try:
        return Endpoint(**json.loads(text)["rankup"])
    except (ValueError, TypeError, LookupError):
        raise LaunchError(
            f"--init-method: {path} must be a new file, got one that holds something else. Name another, or remove it."
        ) from None


def publish_endpoint(path: Path, endpoint: Endpoint) -> None:
    """Write the endpoint; a reader sees the old file or the whole new one. Raises LaunchError where that fails."""
    try:
        write_atomically(path, json.dumps({"rankup": asdict(endpoint)}) + "\n")
    except OSError as error:
        raise LaunchError(f"--init-method: {path} must be writable for rank 0, got {error.strerror}.") from None


def remove_endpoint(path: Path, endpoint: Endpoint) -> None:
    """Remove the file, unless another run's endpoint stands in it by now."""
    with contextlib.suppress(OSError, LaunchError):
        if read_endpoint(path) == endpoint:
            path.unlink()
