"""Where rank 0 listens: host lists, ports that do not collide, and whether a host name can be one. No torch here."""

import ipaddress
import itertools
import re
from pathlib import Path

from train.errors import LaunchError

# The kernel hands these out to outgoing connections, so that a port among them may be taken at any moment.
DEFAULT_EPHEMERAL = range(32768, 61000)
_EPHEMERAL_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Services one meets on cluster nodes: Webmin, node agents, memcached, Ollama, RabbitMQ, API servers, the default of a
# training operator, GlusterFS, Redis Sentinel, FlexLM, MongoDB and torch's own default.
_TAKEN = {10000, 10250, 10255, 10256, 11211, 11434, 15672, 16443, 23456, 24007, 24008, 26379, 29500}
_TAKEN |= set(range(27000, 27020))
# Below DEFAULT_EPHEMERAL on every system that did not change it, above the ports that need root.
_PORTS = [port for port in range(10000, 30000) if port not in _TAKEN]
_MAX_HOSTS = 65536


def expand_nodelist(nodelist: str) -> list[str]:
    """The hosts of a compressed list, in order: "n[1-3,7],m05" -> n1 n2 n3 n7 m05. Leading zeros are kept.

    Raises LaunchError if the list is malformed or names more than 65536 hosts. In Python, because the scheduler's own
    command for it does not exist inside containers.
    """
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+|[,\[\]]", nodelist.strip()):
        if item == ",":
            continue
        parts = re.split(r"\[([^\[\]]*)\]", item)  # text, range, text, range, ..., text
        choices = [_expand_ranges(p, nodelist) if i % 2 else [p] for i, p in enumerate(parts)]
        if any(set(text) & set("[] \t") for text in parts[::2]):
            raise _bad_nodelist(nodelist)
        hosts += ["".join(names) for names in itertools.islice(itertools.product(*choices), _MAX_HOSTS + 1)]
        if len(hosts) > _MAX_HOSTS:
            raise _bad_nodelist(nodelist)
    if not hosts:
        raise _bad_nodelist(nodelist)
    return hosts


def _expand_ranges(ranges: str, nodelist: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        found = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", item)
        if not found:
            raise _bad_nodelist(nodelist)
        first, last = found[1], found[2] or found[1]
        if not 0 <= int(last) - int(first) < _MAX_HOSTS:
            raise _bad_nodelist(nodelist)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def expand_counts(counts: str) -> list[int]:
    """Repeated counts, one a node: "2(x3),1" -> 2 2 2 1. Empty if they cannot be read."""
    if not re.fullmatch(r"[0-9]+(\(x[0-9]{1,5}\))?(,[0-9]+(\(x[0-9]{1,5}\))?)*", counts):
        return []
    pairs = re.findall(r"([0-9]+)(?:\(x([0-9]+)\))?", counts)
    return [int(count) for count, times in pairs for _ in range(int(times or 1))]


def _bad_nodelist(nodelist: str) -> LaunchError:
    return LaunchError(f"a host list must look like n[1-3,7],m05, got {nodelist!r}. Set MASTER_ADDR to rank 0's host.")


def ephemeral_range(file: Path = _EPHEMERAL_FILE) -> range:
    """This machine's ports for outgoing connections; Linux's default where the file cannot be read."""
    try:
        first, last = (int(number) for number in file.read_text().split())
    except (OSError, ValueError):
        return DEFAULT_EPHEMERAL
    return range(first, last + 1)


def port_for(job_id: str, restart: int, ephemeral: range, *, step: int = 0) -> int:
    """A port for rank 0, the same on every node of a job, outside `ephemeral` and away from well-known services.

    Jobs whose ids are less than 19000 apart get different ports, and so do a job's restarts, as the earlier attempt may
    still hold its port. Nodes whose ephemeral ranges differ agree unless the first choice lies in one of them.
    """
    start = int(job_id) + 7919 * restart + 3571 * step  # primes, so that neighbouring jobs, restarts and steps differ
    for distance in range(len(_PORTS)):
        port = _PORTS[(start + distance * 4999) % len(_PORTS)]
        if port not in ephemeral and port not in DEFAULT_EPHEMERAL:
            return port
    return _PORTS[start % len(_PORTS)]  # the site gave every port to outgoing connections: nothing is better than this


def is_loopback(host: str) -> bool:
    """Does this name or address mean "this machine" wherever it is read?"""
    if host.lower().rstrip(".") in {"localhost", "localhost.localdomain", "ip6-localhost"}:
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback or address.is_unspecified


def host_mistake(host: str) -> str | None:
    """What is wrong with a host name or address, as the end of a sentence; None if nothing is."""
    if host != host.strip() or re.search(r"\s", host):
        return "must have no spaces or line ends"
    if host.startswith("[") and host.endswith("]"):
        return "must be an IPv6 address without brackets"
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if re.fullmatch(r"[^:]+:[0-9]+", host):
            return "must be a host alone; its port belongs into MASTER_PORT"
        if not re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*)", host):
            return "must be a host name or an address"
    return None
