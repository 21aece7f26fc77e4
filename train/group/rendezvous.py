"""Joining: who is there, who is missing, and why, all within one deadline of our own.

torch's own text is the same for a wrong address, a closed port and a peer that never started, it waits up to five
times as long on one side, and a foreign service on the port makes its client wait for ever. So every rank first
meets the others in a store, by name: rank 0 reads the roster, judges it, and tells all.

The store holds generations. Rank 0 opens one each time it starts; the others introduce themselves in the newest, and wait
for the next where it was decided without them: the store of torch's agent outlives an attempt, and so may, for
seconds, that of a rank 0 which is on its way out.
"""

import concurrent.futures
import json
import os
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# torch exports these under a condition that mypy does not follow
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from train.errors import JOIN_FAILED, USER_MISTAKE, JoinError, UserError
from train.group import file_rendezvous
from train.group.members import Member, Roster, describe_claims, describe_differences, describe_missing
from train.group.network import explain_connection, is_own_address, try_connect
from train.group.store import connect_store, open_port, port_in_use, serve_store
from train.process.env import Launch
from train.process.init_method import Endpoint, look, remove
from train.process.log import Log

POLL_S = 0.1
PORT_PATIENCE_S = 5.0  # the process of the last attempt may still be on its way out
HEARD_S = 3.0  # how long rank 0 stays for the others to read why there is no group
STUCK_S = 5.0  # how long after the deadline a call into the network, which nothing can interrupt, is given up
NOTICE_S = 20.0  # between lines that say what is being waited for


@dataclass(slots=True)
class Meeting:
    """The outcome of joining: a store private to this attempt, and the members in the order of their ranks."""

    store: Store
    beat_store: Store  # a connection of its own: one client serves one thread at a time
    members: list[Member]
    attempt: str
    hosts_store: bool
    deadline_s: float  # on the monotonic clock: what is left of the time to join


def meet(launch: Launch, *, fingerprint: Mapping[str, str], attempt: str, timeout_s: float, log: Log) -> Meeting:
    """Join the group, or say who and what is missing.

    Raises JoinError (code 170) once `timeout_s` has passed or rank 0 found the roster impossible, UserError where ranks
    differ in code or settings, LaunchError where the port can't be used. In a thread, since no call may hold us longer:
    a resolver without an answer, or a store whose process is stopped, blocks without end.
    """
    if launch.rank == 0:
        log.info(f"waiting for {launch.world_size} ranks at {launch.file or f'{launch.master_addr}:{launch.master_port}'}")
    join = _Join(launch, dict(fingerprint), attempt, timeout_s, log)
    outcome: concurrent.futures.Future[Meeting] = concurrent.futures.Future()
    threading.Thread(target=join.run, args=(outcome,), name="join", daemon=True).start()
    if not concurrent.futures.wait([outcome], timeout=timeout_s + STUCK_S).done:
        raise join.failure(join.doing)
    return outcome.result()


class _Join:
    def __init__(self, launch: Launch, fingerprint: dict[str, str], attempt: str, timeout_s: float, log: Log) -> None:
        self.launch, self.attempt, self.timeout_s, self.log = launch, attempt, timeout_s, log
        self.deadline_s = time.monotonic() + timeout_s
        self.hosts_store = launch.rank == 0 and not launch.agent_store
        self.address = launch.file or f"{launch.master_addr}:{launch.master_port}"
        self.notice: Endpoint | None = None  # what rank 0 left in the file
        self.me = Member(
            rank=launch.rank, world_size=launch.world_size, host=log.host, pid=os.getpid(), local_rank=launch.local_rank,
            node=launch.node_rank, restarts=launch.restart_count, token=secrets.token_hex(6), fingerprint=fingerprint,
        )
        self.roster = Roster()  # of the newest generation
        self.doing = "starting"  # what the call that is under way means for the user, should it never return
        self.problem = f"nothing was heard from rank 0 at {self.address}"  # the last one; others may follow
        self._noticed_s = time.monotonic()
        self._poll_s = POLL_S * min(10.0, max(1.0, launch.world_size / 64))  # the store serves all of them

    def run(self, outcome: "concurrent.futures.Future[Meeting]") -> None:
        try:
            outcome.set_result(self._join())
        except BaseException as error:
            outcome.set_exception(error)
        finally:
            if self.notice is not None:  # whoever is to read it has read it
                remove(Path(self.launch.file), self.notice)

    def _join(self) -> Meeting:
        server = self._serve() if self.hosts_store else None
        while True:
            try:
                if server is not None:
                    return self._attend(server, self.me)
                store, local_ip, master_ip = self._connect()
                return self._attend(store, replace(self.me, local_ip=local_ip, master_ip=master_ip))
            except (RuntimeError, ConnectionError) as error:  # torch's own errors are RuntimeErrors
                if isinstance(error, JoinError):
                    raise
                # The store's process was ending after an earlier attempt, or died while joining: it may come back
                self.problem = f"the store at {self.address} went away ({_first_line(error)})"
                self._pause()

    # The store ------------------------------------------------------------------------------------------------

    def _serve(self) -> Store:
        """Open the port and start the store. Raises JoinError, naming who holds the port, or LaunchError."""
        if self.launch.file:
            self.doing = f"somebody at the address in {self.address} accepts connections and does not answer. Remove the file"
            store, self.notice = file_rendezvous.serve(Path(self.launch.file), self.log, timeout_s=self.timeout_s)
            return store
        port = self.launch.master_port
        until_s = min(self.deadline_s, time.monotonic() + PORT_PATIENCE_S)
        while (listener := open_port(port)) is None:
            if time.monotonic() > until_s:
                raise port_in_use(port, self.log.host)
            self._pause()
        self.doing = f'the name "{self.launch.master_addr}" gets no answer from the resolver'
        if not is_own_address(self.launch.master_addr):
            self.log.warning(
                f"MASTER_ADDR={self.launch.master_addr} is no address of this machine ({self.log.host}), where rank 0 "
                "runs and listens. Right behind a Service or NAT, a mistake elsewhere."
            )
        return serve_store(listener, timeout_s=self.timeout_s)

    def _connect(self) -> tuple[Store, str, str]:
        """A client of the master's store, our address on the way there, and the address that answered.

        Name, port and store may all come up after us (a Service in Kubernetes, a container started later): each is tried
        again until the deadline, and the last problem is what the message says.
        """
        if self.launch.file:
            return self._connect_by_file()
        host, port = self.launch.master_addr, self.launch.master_port
        refused = ""
        while True:
            self.doing = f'the name "{host}" gets no answer from the resolver'
            tried = try_connect(host, port, timeout_s=2.0)
            if tried.problem is None:
                self.doing = (
                    f"something accepts connections at {self.address} but does not answer as a rendezvous store: another "
                    "service holds the port, the machine is the wrong one, or the process of rank 0 is stopped"
                )
                left_s = max(1.0, self.deadline_s - time.monotonic())
                try:
                    return connect_store(host, port, timeout_s=left_s), tried.local_ip, tried.master_ip
                except RuntimeError:
                    self.problem = self.doing
            else:
                now = explain_connection(tried, host, port)
                # When rank 0 gives up, its container goes, and with it the name or the address: before that was the cause
                refused = now if tried.problem == "refused" else refused
                self.problem = f"{refused}. By now {now}" if refused and refused != now else now
            if time.monotonic() > self.deadline_s:
                raise self.failure(self.problem)
            self._pause()

    def _connect_by_file(self) -> tuple[Store, str, str]:
        """The same, of the store whose address is in the file: read again until rank 0 has written its own."""
        self.doing = f"somebody at the address in {self.address} accepts connections and does not answer. Remove the file"
        while True:
            notice = look(Path(self.launch.file))
            if notice is not None and (found := file_rendezvous.connect(notice, self.log.host)):
                return found
            self.problem = f"rank 0 has not left its address in {self.address}"
            if notice is not None:
                self.problem += (
                    f"; what is there was left on {notice.host} by an earlier run, or no way leads to "
                    f"{', '.join(notice.addresses) or 'it'} port {notice.port}"
                )
            if time.monotonic() > self.deadline_s:
                raise self.failure(self.problem)
            self._pause()

    # The roster -----------------------------------------------------------------------------------------------

    def _attend(self, raw: Store, me: Member) -> Meeting:
        """Introduce this rank in the newest generation until one is decided with it."""
        root = PrefixStore("rankup", raw)
        host_of_store = "the launcher's agent" if self.launch.agent_store else "the process of rank 0"
        self.doing = f"the store at {self.address} answers no more: {host_of_store} is stopped, or its machine out of reach"
        if me.rank == 0:
            PrefixStore(str(root.add("generation", 0) + 1), root).set("main", me.to_json())
            root.add("generation", 1)
        generation, store = 0, root
        while True:
            if (latest := root.add("generation", 0)) != generation:
                earlier, generation, store = generation, latest, PrefixStore(str(latest), root)
                if me.rank == 0 and earlier:
                    raise JoinError(describe_claims([me, Member.from_json(store.get("main"))]))
                store.append("roster", me.to_json() + "\n")  # type: ignore[attr-defined]
                self.roster = Roster()
                self.problem = f"rank 0 at {self.address} is still waiting for others"
                self.log.debug(f"introduced to the others at {self.address}")
            if generation:
                store.add(f"alive/{me.token}", 1)
                if store.check(["verdict"]):
                    verdict = json.loads(store.get("verdict"))
                    if (members := self._heed(store, verdict, me)) is not None:
                        private, beats = (PrefixStore(f"rankup/{generation}/group", s) for s in (raw, raw.clone()))
                        return Meeting(private, beats, members, verdict["attempt"], self.hosts_store, self.deadline_s)
                elif me.rank == 0:
                    self._judge(store)
            if time.monotonic() > self.deadline_s:
                self._give_up(store, generation)
            self._pause()

    def _heed(self, store: Store, verdict: dict[str, Any], me: Member) -> list[Member] | None:
        """The members if this rank is one of them, the error that was meant for it, or None: it belongs to the next."""
        if "members" not in verdict:
            if me.token in verdict["tokens"]:
                store.add("heard", 1)
                raise _error_of(verdict, me.token)
            self.problem = verdict["text"]
            return None
        members = [Member(**told) for told in verdict["members"]]
        if me.rank < len(members) and members[me.rank].token == me.token:
            return members
        holder = f"rank {me.rank} on {members[me.rank].place}" if me.rank < len(members) else f"{len(members)} ranks"
        self.problem = (
            f"the group at {self.address} was complete before this rank came, with {holder}: two processes with one rank, "
            "another job on this port, or an earlier attempt that does not end"
        )
        return None

    def _judge(self, store: Store) -> None:
        """Rank 0's look at the roster: decide once it is complete or impossible."""
        self.roster.look(store)
        for member in self.roster.living():
            if member.world_size != self.launch.world_size:
                self._abort(
                    store,
                    f"rank {member.rank} on {member.place} was started with WORLD_SIZE={member.world_size}, rank 0 on "
                    f"{self.me.place} with WORLD_SIZE={self.launch.world_size}. Set the same on all ranks.",
                )
        if claims := self.roster.claimed_twice():
            self._abort(store, describe_claims(claims))
        members = self.roster.present()
        if [member.rank for member in members] != list(range(self.launch.world_size)):
            return
        if differences := describe_differences(members):
            self._abort(store, differences, code=USER_MISTAKE)
        told = [{**json.loads(member.to_json()), "fingerprint": {}} for member in members]
        store.set("verdict", json.dumps({"attempt": self.attempt, "members": told}))

    def _abort(self, store: Store, text: str, *, code: int = JOIN_FAILED) -> None:
        """Tell all ranks why there will be no group, give them time to read it, and raise it here too."""
        living = self.roster.living()
        tokens = [member.token for member in living]
        speakers = [member.token for member in living if member.prints_for_host(living)]
        verdict = {"code": code, "text": text, "tokens": tokens, "speakers": speakers}
        store.set("verdict", json.dumps(verdict))
        until_s = time.monotonic() + HEARD_S
        while time.monotonic() < until_s and store.add("heard", 0) < len(tokens) - 1:
            time.sleep(POLL_S / 5)  # this process hosts the store
        raise _error_of(verdict, self.me.token)

    def _give_up(self, store: Store, generation: int) -> None:
        where = "file" if self.launch.file else "MASTER_ADDR, MASTER_PORT"
        advice = f"Was every process started, with this {where} and WORLD_SIZE?"
        if self.launch.rank == 0:
            self._abort(store, f"{self._missing(self.timeout_s)}. {advice}")
        if generation == 0:
            self.problem = f"rank 0 never introduced itself to the store at {self.address}, is it another job's?"
        elif not store.check(["verdict"]):
            self.roster.look(store)
            quiet = not self.me.prints_for_host(self.roster.living())
            raise JoinError(f"{self._missing(self.timeout_s)}. {advice}", printed_elsewhere=quiet)
        raise self.failure(self.problem)

    def _missing(self, waited_s: float) -> str:
        return describe_missing(
            self.roster.living(), self.roster.gone(), world_size=self.launch.world_size,
            local_world_size=self.launch.local_world_size, waited_s=waited_s,
        )

    def failure(self, problem: str) -> JoinError:
        names = "MASTER_ADDR and MASTER_PORT have to name the machine and port of rank 0 on all ranks."
        return JoinError(
            f"rank {self.launch.rank} of {self.launch.world_size} on {self.log.host} could not join within "
            f"{self.timeout_s:g} s: {problem}. {'All ranks have to name the same file.' if self.launch.file else names}",
            stage="store" if "does not answer as a rendezvous store" in problem else "",
        )

    def _pause(self) -> None:
        time.sleep(self._poll_s)
        now_s = time.monotonic()
        if now_s - self._noticed_s > NOTICE_S:
            self._noticed_s = now_s
            if self.launch.rank == 0:
                self.log.info(f"still waiting: {self._missing(round(now_s - self.deadline_s + self.timeout_s))}")
            elif self.launch.local_rank == 0:
                self.log.warning(f"still waiting: {self.problem}")


def _error_of(verdict: Mapping[str, Any], token: str) -> Exception:
    """The error that rank 0 found. All raise it, one rank of each machine prints it."""
    kind = UserError if verdict["code"] == USER_MISTAKE else JoinError
    return kind(verdict["text"], printed_elsewhere=token not in verdict["speakers"])


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]
