"""What an agent does on disk and with ports while it leads. The meeting decides when. No file access blocks the event
loop."""

import asyncio
import contextlib
import functools
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from rankup import timing
from rankup.agent.events import Judged
from rankup.agent.leading import Leading
from rankup.agent.network import in_thread, open_port
from rankup.agent.ranks import Ranks
from rankup.agent.status_files import ScriptStatus
from rankup.env.launchers import free_port
from rankup.errors import JoinError, PeerLost, UserError, disk_errors
from rankup.places.object_store import ObjectStore

log = logging.getLogger("rankup")


async def id_of(shared_dir: str) -> str:
    """Return an id that is the same on all nodes that share this place. Raises UserError, PeerLost and JoinError."""

    def read() -> str:
        place = ObjectStore.open(shared_dir, warn=log.debug)
        place.create("shared.json", json.dumps({"id": secrets.token_hex(8)}).encode())
        # Otherwise two halves of a job could both claim the right to continue
        place.must_refuse("shared.json", option="--shared-dir")
        until_s = time.monotonic() + timing.VISIBLE_S
        while not (found := str(place.read_json("shared.json").get("id", ""))):
            if time.monotonic() > until_s:
                got = "an empty file: its disk was full, or its writer was killed. Remove it."
                got = "one of another program. Name another folder." if place.read("shared.json") else got
                raise UserError(f"--shared-dir: {shared_dir}/shared.json must hold rankup's id, got {got}")
            time.sleep(timing.PAUSE_S)  # another node is writing the file
        return found

    try:
        return await in_thread(read, timeout_s=timing.PREPARE_S)  # `read` may import an object store's client
    except TimeoutError:
        raise JoinError(f"--shared-dir: {shared_dir} does not answer") from None


class LeaderFiles:
    """Claims, the run's lease and status, and the store of the ranks. `leading`: returns what this node decides, or
    None while it does not lead."""

    def __init__(self, ranks: Ranks, leading: Callable[[], Leading | None]) -> None:
        self.ranks, self.options, self._leading = ranks, ranks.options, leading
        self.status: ScriptStatus | None = None
        self._taking: asyncio.Task[bool] | None = None  # takes the run's lease, see `ScriptStatus.take`
        self._writing: asyncio.Task[None] | None = None  # writes how the job ended

    async def claim(self, job: str, number: int) -> bool:
        """Claim the right to form the membership after `number`. Returns whether this node got the claim."""
        if (leading := self._leading()) is None:
            return False
        token = json.dumps({"token": leading.me.token}).encode()

        def create() -> bool:
            return ObjectStore.open(self.options.shared_dir, warn=log.debug).create(f"{job}-after-{number}.json", token)

        with contextlib.suppress(OSError, UserError, PeerLost):
            return await in_thread(create, timeout_s=timing.CLAIM_S)
        return False

    async def prepare(self, n: int, size: int, job: str, restarts: int) -> Mapping[str, Any]:
        """Return what the commit of membership `n` says besides what the meeting decides."""
        imports_rankup, again, port = self.options.script.imports_rankup, False, 0
        if not imports_rankup:
            status = self.status = self.status or ScriptStatus(self.options.run_dir)
            attempt = f"{job}-{restarts}"
            if self._taking is None:
                take = functools.partial(status.take, attempt, agreed=self.options.node.limits is not None)
                self._taking = asyncio.create_task(in_thread(take))
            with disk_errors("run_dir", self.options.run_dir):
                again = await asyncio.shield(self._taking)  # if a member is lost meanwhile, the next commit uses it
                if self._is_open(n):
                    await in_thread(functools.partial(status.begin, attempt, size))
                    # Report now, because the script may end before `report` does. Nobody waits: the disk may hang
                    self.ranks.begin(in_thread(status.report))
        if self._is_open(n):  # otherwise a member was lost meanwhile, and nobody reads what this returns
            if imports_rankup:
                with open_port("127.0.0.1" if self.options.node.num_nodes == 1 else "", 0) as listener:
                    self.ranks.server.start_store(listener)
                    port = listener.getsockname()[1]
            else:
                port = free_port()
        return {"port": port, "store": imports_rankup, "again": again}

    def _is_open(self, n: int) -> bool:
        leading = self._leading()
        return leading is not None and leading.proposed == n

    async def report(self) -> None:
        """Report for `rankup status`, forever."""
        while True:
            await asyncio.sleep(timing.REPORT_S)
            status, leading = self.status, self._leading()
            if status is None or leading is None or status.owner is None:
                continue
            if leading.running or self.options.node.limits is not None:
                ranks, nodes = leading.heartbeats(), leading.nodes()
                await in_thread(functools.partial(status.report, heartbeats=ranks, nodes=nodes))

    def judged(self, output: Judged) -> None:
        """Write how the job ended."""
        if (status := self.status) is not None:
            code, text = output.verdict.code or 0, output.verdict.text
            self._writing = asyncio.create_task(in_thread(functools.partial(status.end, code, text, output.ends)))

    def give_up(self) -> None:
        """Another node leads."""
        if self.status is not None:
            self.status.held.close()
        self.status = self._taking = None

    async def close(self) -> None:
        """Finish writing, for a limited time: a disk that hangs must not hide the end."""
        if self._writing is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._writing, timing.REPORT_END_S)
        if self.status is not None:
            with contextlib.suppress(TimeoutError):
                await in_thread(self.status.held.close, timeout_s=timing.LAST_MESSAGE_S)
