"""Machines made of namespaces, joined by a cable. Each has its own network, host name and /etc/hosts. Needs Linux, root
and iproute2.

A node lives as long as its first process. Everything in it ends with `close`; the machine itself does not change."""

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

NEEDED = {"ip": "iproute2", "iptables": "iptables", "unshare": "util-linux", "nsenter": "util-linux"}
NODE = "TEST_NODE_PID"  # the pid of the node that a forked process must enter


@cache
def missing() -> str:
    """Return why no nodes can be made here, and the command that helps, or "" if they can."""
    lacking = {package for tool, package in NEEDED.items() if shutil.which(tool) is None}
    if lacking:
        return f"nodes of namespaces need {', '.join(sorted(lacking))}: apt-get install -y {' '.join(sorted(lacking))}"
    if os.geteuid() != 0:
        return "nodes of namespaces need root: sudo make test"
    try_one = ["unshare", "-n", "-u", "-m", "ip", "link", "add", "type", "veth"]
    tried = subprocess.run(try_one, capture_output=True, text=True)
    if tried.returncode:
        return f"nodes of namespaces can't be made here ({tried.stderr.strip()}): docker run --privileged"
    return ""


def need() -> None:
    """Skip the test if no nodes can be made; in CI fail it."""
    import pytest  # not at the top, because ranks import this file too

    if reason := missing():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


class Node:
    """One machine. `eth0` is the cable to the others; `aux0` is up and leads nowhere."""

    def __init__(self, name: str, folder: Path, *, ip: str, aux_ip: str) -> None:
        self.name, self.ip = name, ip
        self._ready = False
        self.hosts_file = folder / f"hosts-{name}"
        # Debian writes this line for a machine's name. With it gloo publishes an address that no other node can reach
        self.hosts_file.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        self.folder, self.lookup_file = folder, folder / f"nsswitch-{name}"
        self.lookup_file.write_text("hosts: files\n")
        script = (
            f"hostname {name} && mount --bind {self.hosts_file} /etc/hosts"
            f" && mount --bind {self.lookup_file} /etc/nsswitch.conf && ip link set lo up"
            " && ip link add aux0 type veth peer name aux1 && ip link set aux1 up && ip link set aux0 up"
            f" && ip addr add {aux_ip}/24 dev aux0 && echo ready && exec sleep infinity"
        )
        self._first = subprocess.Popen(["unshare", "-n", "-u", "-m", "sh", "-c", script], stdout=subprocess.PIPE,
                                       text=True, stdin=subprocess.DEVNULL)

    @property
    def pid(self) -> int:
        """The id of the node's first process, once the node is ready."""
        assert self._first.stdout is not None
        assert self._ready or self._first.stdout.readline() == "ready\n", f"no node {self.name}"
        self._ready = True
        return self._first.pid

    @property
    def env(self) -> dict[str, str]:
        return {NODE: str(self.pid)}

    def run(self, *commands: str) -> str:
        """Run shell commands on the node, and return their output."""
        script = "\n".join(commands)
        done = subprocess.run([*self.prefix, "sh", "-ec", script], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{self.name}: {commands}: {done.stderr}"
        return done.stdout

    @property
    def prefix(self) -> list[str]:
        """The words before a command that run it on the node."""
        return ["nsenter", "-t", str(self.pid), "-n", "-u", "-m"]

    def know(self, name: str, ip: str) -> None:
        """Add a line to /etc/hosts in place, because the file is mounted."""
        with self.hosts_file.open("a") as file:
            file.write(f"{ip} {name}\n")

    def mount(self, text: str, path: str) -> None:
        """Mount a file with this text over the machine's file."""
        file = self.folder / f"{self.name}-{Path(path).name}"
        file.write_text(text)
        self.run(f"mount --bind {file} {path}")

    def listener(self, port: int) -> socket.socket:
        """Return a socket of this process that listens on the node's 127.0.0.1."""
        def make() -> socket.socket:  # a socket belongs to the network namespace of its thread
            _enter_namespace(self.pid, "net")
            return socket.create_server(("127.0.0.1", port))

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(make).result()

    def close(self) -> None:
        self._first.kill()
        self._first.wait()
        if self._first.stdout is not None:
            self._first.stdout.close()


class Net:
    """Machines on one switch: node0 is 192.168.77.1 and so on. (10.x would hide gloo's fault, because there the lower
    address calls and the higher one listens.)"""

    def __init__(self, folder: Path, count: int) -> None:
        need()
        folder.mkdir(parents=True, exist_ok=True)
        self.nodes = [
            Node(f"node{number}", folder, ip=f"192.168.77.{number + 1}", aux_ip=f"172.30.{number}.9")
            for number in range(count)
        ]
        self._switch = Node("switch", folder, ip="", aux_ip="172.30.99.9")
        self._switch.run("ip link add br0 type bridge", "ip link set br0 up")
        for number, node in enumerate(self.nodes):
            cable = f"ip link add eth0 netns {node.pid} type veth peer name port{number} netns {self._switch.pid}"
            subprocess.run(cable.split(), check=True)
            self._switch.run(f"ip link set port{number} master br0", f"ip link set port{number} up")
            node.run(f"ip addr add {node.ip}/24 dev eth0", "ip link set eth0 up")
            for other in self.nodes:
                if other is not node:
                    node.know(other.name, other.ip)

    def cut(self, number: int) -> None:
        """Make the switch drop all packets from and to that node."""
        self._switch.run(f"ip link set port{number} down")

    def mend(self, number: int) -> None:
        self._switch.run(f"ip link set port{number} up")

    def part(self, some: Collection[int], others: Collection[int]) -> None:
        """Let no packet pass between these groups."""
        for here, there in ((some, others), (others, some)):
            for number in here:
                self.nodes[number].run(*(f"iptables -A INPUT -s {self.nodes[other].ip} -j DROP" for other in there))

    def join(self) -> None:
        """Let all nodes reach each other again."""
        for node in self.nodes:
            node.run("iptables -F INPUT")

    def close(self) -> None:
        for node in [*self.nodes, self._switch]:
            node.close()


def enter(environ: Mapping[str, str] = os.environ) -> None:
    """Move this process to the node that its environment names. The process must have only one thread."""
    folder = os.getcwd()
    for kind in ("net", "uts", "mnt"):
        _enter_namespace(environ[NODE], kind)
    os.chdir(folder)


def _enter_namespace(pid: int | str, kind: str) -> None:
    handle = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(handle, 0) != 0:
        raise OSError(ctypes.get_errno(), f"setns to {kind} of {pid}")
    os.close(handle)
