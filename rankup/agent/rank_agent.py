"""The agent of a rank that another launcher started: a process beside the rank, which meets the others for it.

Under torchrun, mpirun or srun nobody else could: a rank that holds the GIL, or dies, can neither answer nor lead. The
rank starts this file as a program. It runs without torch, and shares a pair of sockets and the rank's record with the
rank. The agent of rank 0 leads. An agent is a member of one membership: the launcher restarts its rank.

| from the rank                                     | from its agent                                               |
|---------------------------------------------------|--------------------------------------------------------------|
| begin: the first message, see `RankAgent`         | say(text): print this line                                   |
| end, ask, stop: as from a rank of `rankup launch` | lost, gone, ranks, stop: as to a rank of `rankup launch`     |
| found(at=[ip, port] or null, problem)             | find: where does the leader listen, by the launcher's store? |
|                                                   | listens(port): write this to the launcher's store            |
|                                                   | commit(..., variables): the ranks have met                   |
|                                                   | over(code, text, quiet): they have not. quiet: another rank  |
|                                                   | of this machine prints the text                              |

The agent ends when its rank ends, however it does. The one that leads first tells the others of a loss."""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if not __package__:
    # A rank starts this file by its path, so that it works in any directory
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from rankup import timing
from rankup.agent.events import LOCAL, Ended, Judged, Rules
from rankup.agent.network import LONGEST, Link, address_of, in_thread, interface_variables, listen
from rankup.agent.peers import Peers
from rankup.agent.processes import finish, state_of
from rankup.agent.protocol import MEMBERS, Member
from rankup.agent.record import Record
from rankup.env.rank_env import is_loopback
from rankup.errors import FINISHED, JOIN_FAILED, ExpectedError, UserError, reason
from rankup.places.files import write_atomically

_started = list["subprocess.Popen[bytes]"]()  # Python warns if it forgets a process that still runs


def start(record: Record) -> socket.socket:
    """Start an agent for this process, a rank with this record. Returns the rank's socket; the first message must be
    `begin`. The agent stays in the rank's process group, so that what kills that group leaves nothing behind."""
    ours, theirs = socket.socketpair()
    with theirs:
        files = (theirs.fileno(), record.file)
        # -P: a file of the user's folder must not replace a module of Python
        words = [sys.executable, "-P", __file__, *map(str, files), str(os.getpid())]
        _started.append(subprocess.Popen(
            words, pass_fds=files, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        ))
    return ours


class RankAgent:
    """`begin`: the first message. `member`: the rank as a member, without a token. `listen`: the IP address and port
    where the leader listens. `leader`: where members find it: [host, port]; null if the rank asks the launcher's store.
    `file`: the file in which rank 0 leaves its address, or "". `store_port`: where rank 0 serves torch's store. `job`:
    the id of the attempt. `local_rank`: the rank's index on its machine. `silent_s`: the rank's `timing.SILENT_S`."""

    def __init__(self, rank: Link, record: Record, pid: int, begin: Mapping[str, Any]) -> None:
        self._rank, self._record, self._begin, self._pid = rank, record, begin, pid
        timing.SILENT_S = begin["silent_s"]
        self._file = Path(begin["file"]) if begin["file"] else None
        me = Member(token=secrets.token_hex(8), **begin["member"])
        self._leads = me.first_rank == 0
        rules = Rules(once=True, job=begin["job"])
        self._peers = Peers(me, rules, self, master=self._find_leader, leads=self._leads)
        self._port: int = begin["listen"][1]
        self._found: asyncio.Future[Mapping[str, Any]] | None = None  # the answer to "find"
        self._member = False  # whether this rank belongs to a membership
        self._variables: dict[str, str] = {}  # they name the network interface

    async def run(self) -> None:
        """Return when the rank has ended and the others know it."""
        listens = asyncio.create_task(self._listen_to_rank())
        takes_part = asyncio.create_task(self._take_part())
        takes_part.add_done_callback(self._report_failure)
        await listens
        leading = self._peers.meeting.leading
        if leading is not None:
            self._peers.take(Ended(LOCAL))
            until_s = time.monotonic() + timing.LAST_MESSAGE_S
            while self._member and leading.seats and time.monotonic() < until_s:
                await asyncio.sleep(timing.POLL_S)  # they learn that this rank is lost, and leave
        self._peers.close()

    async def _take_part(self) -> None:
        if self._leads:
            server = await listen(self._peers.accept, ip=self._begin["listen"][0], port=self._port)
            self._port = server.sockets[0].getsockname()[1]
            if self._file is not None:
                await in_thread(self._publish)
            self._rank.send("listens", port=self._port)
        self._peers.start()

    def _report_failure(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self.fail(error)

    def say(self, text: str) -> None:
        self._rank.send("say", text=text)

    # The rank -----------------------------------------------------------------------------------------------------

    async def _listen_to_rank(self) -> None:
        """Take the rank's messages until it ends. A worker that the rank has forked may keep the socket open."""
        ended = asyncio.create_task(self._wait_for_end())
        while True:
            receives = asyncio.ensure_future(self._rank.receive(MEMBERS))
            await asyncio.wait([receives, ended], return_when=asyncio.FIRST_COMPLETED)
            if not receives.done():  # the process has ended; what it said before is in the socket
                await asyncio.wait([receives], timeout=timing.PAUSE_S)
            try:
                message = receives.result()
            except (ConnectionError, asyncio.InvalidStateError):
                return
            if message["is"] != "found":
                self._peers.send(message.pop("is"), **message)
            elif self._found is not None and not self._found.done():
                self._found.set_result(message)

    async def _wait_for_end(self) -> None:
        """Wait until the rank's process has ended, or forever on a kernel or in a container that does not tell."""
        ended = asyncio.Event()
        with contextlib.suppress(OSError, AttributeError):  # from Linux 5.3 on
            asyncio.get_running_loop().add_reader(os.pidfd_open(self._pid), ended.set)
        if os.getppid() == self._pid:
            await ended.wait()

    # The meeting --------------------------------------------------------------------------------------------------

    def hear(self, message: dict[str, Any]) -> None:
        """Act on a message of the leader. The process belongs to only one membership, and must not disturb the next."""
        kind, values = message["is"], {name: value for name, value in message.items() if name != "is"}
        if kind == "propose":
            self._variables = interface_variables(os.environ, message["ip"])
            self._testing = asyncio.create_task(self._peers.try_route(message["n"], message["next"]))
        elif kind == "prepare":
            step = self._record.ask_to_stop(message["stop"])
            self._peers.send("standing", n=message["n"], stop=message["stop"], step=step)
        elif kind == "confirm":
            self._record.confirmed = message["stop"]
        elif kind == "commit":
            self._member = True
            self._rank.send("commit", **values, variables=self._variables)
        elif self._member:
            self._rank.send(kind, **values)
        elif kind == "over":
            # One rank per machine prints the text, and the rank that the text names
            quiet = self._begin["local_rank"] > 0 and self._peers.meeting.me.who not in message["text"]
            self._rank.send("over", code=message["code"], text=message["text"], quiet=quiet)
        if self._member and kind in ("lost", "gone") and not self._leads:
            self._peers.close()

    def heartbeat(self) -> tuple[list[dict[str, Any]], bool]:
        """While the rank is stopped (SIGSTOP), stop this process too, so that the others notice the silence."""
        while state_of(self._pid) == "T":
            time.sleep(timing.PAUSE_S)  # not asyncio's: nothing else may run
        return [self._record.read().heartbeat()], True

    async def prepare(self, n: int, size: int, job: str, restarts: int) -> Mapping[str, Any]:
        return {"port": self._begin["store_port"], "store": False, "again": False}

    async def claim(self, job: str, n: int) -> bool:
        return False  # the job is not elastic

    def judged(self, output: Judged) -> None:
        """Write nothing: each rank writes its own end."""

    def fail(self, error: Exception) -> None:
        code = error.code if isinstance(error, ExpectedError) else JOIN_FAILED
        self._rank.send("over", code=code, text=reason(error), quiet=False)

    # Where the leader is ------------------------------------------------------------------------------------------

    async def _find_leader(self) -> tuple[str, int]:
        """Return the leader's host and port. Raises OSError if they are not published yet, or UserError."""
        if (file := self._file) is not None:
            if found := await in_thread(lambda: read_address(file)):
                return found
            raise ConnectionError(f"rank 0 has not left its address in {file}")
        if self._begin["leader"] is not None:
            host, port = self._begin["leader"]
            return host, port
        self._found = asyncio.get_running_loop().create_future()
        self._rank.send("find")
        answer = await self._found
        if answer["problem"]:
            raise ConnectionError(answer["problem"])
        host, port = answer["at"]
        return host, port

    def _publish(self) -> None:
        """Write rank 0's address, in place of an earlier run's. Raises UserError if the file is not rankup's."""
        assert self._file is not None
        read_address(self._file)
        reached = [ip for name in psutil.net_if_addrs() if (ip := address_of(name)) and not is_loopback(ip)]
        write_atomically(self._file, json.dumps({"rankup": [(reached or ["127.0.0.1"])[0], self._port]}))


def read_address(file: Path) -> tuple[str, int] | None:
    """Read the IP address and port that rank 0 left in `file`. Returns None if there is no file, or an empty one, such
    as mktemp makes. Raises UserError if the file holds something else, and OSError if it can't be read."""
    try:
        text = file.read_text(errors="replace")
        if not text:
            return None
        ip, port = json.loads(text)["rankup"]
        return str(ip), int(port)
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        raise UserError(
            f"--init-method: {file} must be a new file, got one that holds something else. Name another."
        ) from None


async def serve(line: int, record: int, pid: int) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=line), limit=LONGEST)
    rank = Link(reader, writer)
    with contextlib.suppress(ConnectionError):  # the rank has ended already
        begin = await rank.receive()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # whoever reads the rank's stderr must not wait for this process
        try:
            await RankAgent(rank, Record.of(record), pid, begin).run()
        except Exception as error:  # without this, a bug of rankup would have no trace
            rank.send("over", code=JOIN_FAILED, text=reason(error), quiet=False)


def main() -> None:
    # A terminal and a batch system send these to each process. The rank gets them too, and says what they mean
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(each, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("rank's agent")
    asyncio.run(serve(*map(int, sys.argv[1:])))
    finish(FINISHED)


if __name__ == "__main__":
    main()
