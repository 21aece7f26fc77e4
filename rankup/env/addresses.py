"""Where rank 0 listens: ports that do not collide, host names that can be one, --init-method. No torch here."""

import ipaddress
import random
import re
import socket
import urllib.parse
from pathlib import Path

from rankup.errors import LaunchError

# torchrun's default too. The nodes of a launch by hand must agree on a port without talking to each other first.
PORT_OF_LAUNCH = 29400
# Services one meets on cluster nodes: Webmin, node agents, memcached, Ollama, RabbitMQ, API servers, the default of a
# training operator, GlusterFS, Redis Sentinel, FlexLM, MongoDB and torch's own defaults.
_TAKEN = {10000, 10250, 10255, 10256, 11211, 11434, 15672, 16443, 23456, 24007, 24008, 26379, PORT_OF_LAUNCH, 29500}
_TAKEN |= set(range(27000, 27020))
# Below those that Linux gives to outgoing connections, from 32768 on; above the ports that need root.
_PORTS = [port for port in range(10000, 30000) if port not in _TAKEN]


def port_for(job_id: int, *, restart: int = 0, step: int = 0) -> int:
    """A port for rank 0, the same on every node of a job, away from well-known services.

    Jobs whose ids are less than 19000 apart get different ports, and so do a job's restarts, as the earlier attempt may
    still hold its port.
    """
    # Primes, so that neighbouring jobs, restarts and steps differ
    return _PORTS[(job_id + 7919 * restart + 3571 * step) % len(_PORTS)]


def free_port() -> int:
    """A port of this machine that nobody listens on now. Raises OSError where there is no free one among 100."""
    for port in random.Random().sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("no free port from 10000 to 29999")


def is_loopback(host: str) -> bool:
    """Whether this name or address means "this machine" on every machine."""
    if host.lower().rstrip(".") in {"localhost", "localhost.localdomain", "ip6-localhost"}:
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback or address.is_unspecified


def is_host(text: str) -> bool:
    """Whether that can be a host name, or an address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return bool(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", text))
    return True


def parse_url(url: str) -> dict[str, str]:
    """The variables that --init-method stands for.

    `tcp://host:port` is two of them in another form. With `file:///path` rank 0 opens a free port and writes its
    address into that file, which all ranks can read; it is removed once they have met. torch's own file store keeps
    everything in the file, and waits without end where an earlier run left one. Raises LaunchError for a URL of another
    kind and for a file in no folder.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file" and not parts.netloc and parts.path.strip("/"):
        path = Path(urllib.parse.unquote(parts.path))
        if not path.parent.is_dir() or path.is_dir():
            raise LaunchError(f"--init-method must name a file in a folder that exists and all ranks see, got {path}.")
        # No address is known yet: these pass the checks of the five variables, and nobody opens the port
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANKUP_FILE": str(path)}
    address = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/@]+):([0-9]+)/?", parts.netloc + parts.path)
    if parts.scheme == "tcp" and address and not parts.query:
        return {"MASTER_ADDR": address[1].strip("[]"), "MASTER_PORT": address[2]}
    raise LaunchError(f"--init-method must be tcp://HOST:PORT or file:///PATH, got {url}. For env:// leave it out.")
