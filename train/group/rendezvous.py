"""Meeting: who is there, who is missing, and why, all within one deadline of our own.

torch's own text is the same for a wrong address, a closed port and a peer that never started, it waits up to five
times as long on one side, and a foreign service on the port makes its client wait without end. So every rank first
introduces itself to the others in a store: rank 0 (`Host`) reads the roster, judges it, and sets the verdict, which
all others (`Guest`) read. The keys, and why there are generations, are in `keys`.
"""

import concurrent.futures
import json
import os
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from train.errors import JOIN_FAILED, USER_MISTAKE, JoinError, UserError
from train.group import file_rendezvous, keys, store
from train.group.file_rendezvous import Endpoint, remove_endpoint
from train.group.members import Meeting, Member, Roster, describe_claims, describe_differences, describe_missing
from train.group.waiting import Wait
from train.process.env import Launch
from train.process.log import Log

STUCK_S = 5.0  # so long after the deadline a call into the network, which nothing can interrupt, is given up
READ_S = 3.0  # how long rank 0 stays for the others to read why there is no group
READ_POLL_S = 0.02


def meet(launch: Launch, *, fingerprint: Mapping[str, str], attempt: str, timeout_s: float, log: Log) -> Meeting:
    """Meet the other ranks, or say who and what is missing.

    Raises JoinError (code 170) once `timeout_s` has passed or rank 0 found the roster impossible, UserError where ranks
    differ in code or settings, LaunchError where the port can't be used. Works in a thread, since no call may hold us
    longer: a resolver without an answer, or a store whose process is stopped, blocks without end.
    """
    wait = Wait(launch, timeout_s=timeout_s, log=log)
    if launch.rank == 0:
        log.info(f"waiting for {launch.world_size} ranks at {wait.address}")
    joiner: _Joiner = (Host if launch.rank == 0 else Guest)(wait, dict(fingerprint), attempt)
    outcome: concurrent.futures.Future[Meeting] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(joiner.join())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="join", daemon=True).start()
    if not concurrent.futures.wait([outcome], timeout=timeout_s + STUCK_S).done:
        raise wait.failure(wait.stuck_in)
    return outcome.result()


class _Joiner:
    """What a rank does whether it is host or guest."""

    def __init__(self, wait: Wait, fingerprint: dict[str, str], attempt: str) -> None:
        self.wait, self.launch, self.log, self.attempt = wait, wait.launch, wait.log, attempt
        self.number, self.roster = 0, Roster()  # of the generation that this rank has signed in to; 0 before that
        self.generation: Store
        launch = wait.launch
        self.hosts_store = launch.rank == 0 and not launch.agent_store
        self.me = Member(
            rank=launch.rank, world_size=launch.world_size, host=self.log.host, pid=os.getpid(),
            local_rank=launch.local_rank, node=launch.node_rank, restarts=launch.restart_count,
            token=secrets.token_hex(6), fingerprint=fingerprint,
        )

    def join(self) -> Meeting:
        """Reach the store and introduce this rank, again and again until that succeeds or the deadline is over."""
        while True:
            try:
                raw = self.reach_store()
                holder = "the launcher's agent" if self.launch.agent_store else "the process of rank 0"
                answers = f"the store at {self.wait.address} answers no more"
                self.wait.stuck_in = f"{answers}: {holder} is stopped, or its machine out of reach"
                return self.introduce(raw, PrefixStore(keys.ROOT, raw))
            except (RuntimeError, ConnectionError) as error:  # torch's own errors are RuntimeErrors
                if isinstance(error, JoinError):
                    raise
                # The store's process was ending after an earlier attempt, or died while joining: it may come back
                first_line = str(error).partition("\n")[0][:120]
                self.wait.problem = f"the store at {self.wait.address} went away ({first_line})"
                if self.wait.over:
                    raise self.wait.failure(self.wait.problem) from None
                self.wait.pause()

    def reach_store(self) -> Store:
        """A client of the store. Raises JoinError at the deadline."""
        client, route = file_rendezvous.connect(self.wait) if self.launch.file else store.connect(self.wait)
        self.me = replace(self.me, local_ip=route.local_ip, master_ip=route.master_ip)
        return client

    def introduce(self, raw: Store, root: Store) -> Meeting:
        """Be one of the roster of the newest generation until that is decided. Raises JoinError and UserError."""
        raise NotImplementedError

    def sign_in(self, number: int, root: Store) -> None:
        """Enter the roster of a generation."""
        self.number, self.roster, self.generation = number, Roster(), PrefixStore(str(number), root)
        self.generation.append(keys.ROSTER, self.me.to_json() + "\n")  # type: ignore[attr-defined]
        self.log.debug(f"introduced to the others at {self.wait.address}")

    def meeting(self, raw: Store, members: list[Member], attempt: str) -> Meeting:
        ours, beats = (PrefixStore(keys.members(self.number), client) for client in (raw, raw.clone()))
        return Meeting(ours, beats, members, attempt, self.hosts_store, self.wait.deadline_s)

    def missing(self, waited_s: float) -> str:
        return describe_missing(
            self.roster.living(), self.roster.gone(), world_size=self.launch.world_size,
            local_world_size=self.launch.local_world_size, waited_s=waited_s,
        )

    def missing_at_deadline(self) -> str:
        where = "file" if self.launch.file else "MASTER_ADDR, MASTER_PORT"
        advice = f"Was every process started, with this {where} and WORLD_SIZE?"
        return f"{self.missing(self.wait.timeout_s)}. {advice}"


class Host(_Joiner):
    """Rank 0: serves the store, unless torch's agent does, and decides whether the ranks make a group."""

    def __init__(self, wait: Wait, fingerprint: dict[str, str], attempt: str) -> None:
        super().__init__(wait, fingerprint, attempt)
        self._server: Store | None = None  # once it is there
        self._endpoint: Endpoint | None = None  # what was written into the file

    def join(self) -> Meeting:
        try:
            return super().join()
        finally:
            if self._endpoint is not None:  # every rank has read it by now, or there will be no group
                remove_endpoint(Path(self.launch.file), self._endpoint)

    def reach_store(self) -> Store:
        if not self.hosts_store:
            return super().reach_store()
        if self._server is None:
            if self.launch.file:
                self._server, self._endpoint = file_rendezvous.serve(self.wait)
            else:
                self._server = store.serve(self.wait)
        return self._server

    def introduce(self, raw: Store, root: Store) -> Meeting:
        """Open a generation and judge its roster at every look."""
        self.sign_in(root.add(keys.GENERATION, 1), root)
        # Another rank 0 that sees the new generation waits for this in its `get`
        self.generation.set(keys.MAIN, self.me.to_json())
        while True:
            if (latest := root.add(keys.GENERATION, 0)) != self.number:
                other = PrefixStore(str(latest), root).get(keys.MAIN)
                raise JoinError(describe_claims([self.me, Member.from_json(other)]))
            self.generation.add(keys.alive(self.me.token), 1)
            if (members := self._judge()) is not None:
                return self.meeting(raw, members, self.attempt)
            if self.wait.over:
                raise self._refuse(self.missing_at_deadline())
            self.wait.problem = self.missing(round(self.wait.waited_s))
            self.wait.pause()

    def _judge(self) -> list[Member] | None:
        """Set the verdict once the roster is complete, and return the members; None before that. Raises UserError or
        JoinError, on all ranks, where these ranks make no group."""
        self.roster.look(self.generation)
        for member in self.roster.living():
            if member.world_size != self.launch.world_size:
                raise self._refuse(
                    f"rank {member.rank} on {member.place} was started with WORLD_SIZE={member.world_size}, rank 0 on "
                    f"{self.me.place} with WORLD_SIZE={self.launch.world_size}. Set the same on all ranks.",
                )
        if claims := self.roster.claimed_twice():
            raise self._refuse(describe_claims(claims))
        members = self.roster.present()
        if [member.rank for member in members] != list(range(self.launch.world_size)):
            return None
        if differences := describe_differences(members):
            raise self._refuse(differences, code=USER_MISTAKE)
        members = [replace(member, fingerprint={}) for member in members]  # compared, and by far the longest part
        verdict = {"attempt": self.attempt, "members": [asdict(member) for member in members]}
        self.generation.set(keys.VERDICT, json.dumps(verdict))
        return members

    def _refuse(self, text: str, *, code: int = JOIN_FAILED) -> Exception:
        """The error that says why there will be no group, once all ranks had the time to read it."""
        living = self.roster.living()
        verdict = {
            "code": code, "text": text, "tokens": [member.token for member in living],
            "speakers": [member.token for member in living if member.prints_for_host(living)],
        }
        self.generation.set(keys.VERDICT, json.dumps(verdict))
        until_s = time.monotonic() + READ_S
        # This process may host the store: it goes once the others have read
        while time.monotonic() < until_s and self.generation.add(keys.ACKNOWLEDGED, 0) < len(living) - 1:
            time.sleep(READ_POLL_S)
        return _error_of(verdict, self.me.token)


class Guest(_Joiner):
    """Every other rank: signs in and waits for the verdict of rank 0."""

    def introduce(self, raw: Store, root: Store) -> Meeting:
        """Sign in to the newest generation, and to the next where this one was decided without this rank."""
        self.number = 0  # anew for a new connection: the store may be another one
        while True:
            if (latest := root.add(keys.GENERATION, 0)) != self.number:
                self.sign_in(latest, root)
                self.wait.problem = f"rank 0 at {self.wait.address} is still waiting for others"
            if self.number:  # at 0 rank 0 has not come yet
                self.generation.add(keys.alive(self.me.token), 1)
                if self.generation.check([keys.VERDICT]):
                    verdict = json.loads(self.generation.get(keys.VERDICT))
                    if (members := self._read_verdict(verdict)) is not None:
                        return self.meeting(raw, members, verdict["attempt"])
            if self.wait.over:
                raise self._give_up()
            self.wait.pause()

    def _read_verdict(self, verdict: dict[str, Any]) -> list[Member] | None:
        """The members if this rank is one of them; None if it waits for a next generation. Raises the error of all."""
        me = self.me
        if "members" not in verdict:
            if me.token in verdict["tokens"]:
                self.generation.add(keys.ACKNOWLEDGED, 1)
                raise _error_of(verdict, me.token)
            self.wait.problem = verdict["text"]
            return None
        members = [Member(**fields) for fields in verdict["members"]]
        if me.rank < len(members) and members[me.rank].token == me.token:
            return members
        holder = f"rank {me.rank} on {members[me.rank].place}" if me.rank < len(members) else f"{len(members)} ranks"
        self.wait.problem = (
            f"the group at {self.wait.address} was complete before this rank came, with {holder}: two processes with "
            "one rank, another job on this port, or an earlier attempt that does not end"
        )
        return None

    def _give_up(self) -> JoinError:
        """The error at the deadline, where rank 0 has found none."""
        where = self.wait.address
        if not self.number:
            return self.wait.failure(f"rank 0 never introduced itself to the store at {where}, is it another job's?")
        if not self.generation.check([keys.VERDICT]):
            self.roster.look(self.generation)
            quiet = not self.me.prints_for_host(self.roster.living())
            return JoinError(self.missing_at_deadline(), printed_elsewhere=quiet)
        return self.wait.failure(self.wait.problem)


def _error_of(verdict: Mapping[str, Any], token: str) -> Exception:
    """The error that rank 0 found. All raise it, one rank of each machine prints it."""
    kind = UserError if verdict["code"] == USER_MISTAKE else JoinError
    return kind(verdict["text"], printed_elsewhere=token not in verdict["speakers"])
