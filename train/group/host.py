"""Rank 0 while the ranks join: it serves the store, keeps the roster, and decides whether the ranks make a group."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from rankup.errors import JOIN_FAILED, USER_MISTAKE, JoinError
from train.group import file_rendezvous, keys, store
from train.group.file_rendezvous import Endpoint, remove_endpoint
from train.group.joiner import Joiner
from train.group.members import (
    Meeting,
    Member,
    Paths,
    describe_claims,
    describe_differences,
    describe_missing,
    speakers,
)
from train.group.messages import Inbox, say
from train.group.roster import EARLIER_S, Roster
from train.group.waiting import Wait

READ_S = 3.0  # how long rank 0 stays for the others to read why there is no group
LAST_CALL_S = 3.0  # before its deadline rank 0 begins to find out which of those that came are still alive
TELL_S = 0.2  # between two answers to ranks whose time is over, since all of them read each


class Host(Joiner):
    """Rank 0: serves the store, unless torch's agent does, and decides whether the ranks make a group."""

    def __init__(self, wait: Wait, fingerprint: dict[str, str], attempt: str) -> None:
        super().__init__(wait, fingerprint, attempt)
        self._server: Store | None = None  # once it is there
        self._endpoint: Endpoint | None = None  # what was written into the file
        self.roster, self._words = Roster(self.me), 0  # of the generation
        self.inbox: Inbox
        self._settings: dict[str, dict[str, str]] = {self.me.digest: fingerprint}  # those that are known, by digest
        self._asked_s: float | None = None  # the time to join of a rank whose time is over, and that asks why
        self._told_s = 0.0

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

    def introduce(self, raw: Store, beats: Store, root: Store) -> Meeting:
        """Open a generation and judge its roster at every message."""
        self.enter(root.add(keys.GENERATION, 1), root)
        self.roster, self._words = Roster(self.me), 0
        self.inbox = Inbox(self.generation)
        # Who waits for this generation, and another rank 0 that finds it, wait for this
        self.generation.set(keys.MAIN, self.me.to_json())
        while True:
            if (latest := root.add(keys.GENERATION, 0)) != self.number:
                other = PrefixStore(str(latest), root).get(keys.MAIN)
                raise JoinError(describe_claims([self.me, Member.from_json(other)]))
            if (members := self._judge()) is not None:
                return self.meeting(raw, beats, members, self._announce(members))
            if self.wait.over:
                raise self._refuse(self._missing_at_deadline(self.wait.timeout_s))
            if self.wait.notice_due:
                self.wait.problem = self._missing(round(self.wait.waited_s))
                self.wait.notice()
                self._say({"missing": {"text": self.wait.problem, "speakers": []}})  # nobody's time is over: a notice
            for message in self.inbox.collect(EARLIER_S if self.roster.settling else self.wait.slice_s):
                self._read(message)

    def _read(self, message: Mapping[str, Any]) -> None:
        """Take note of what a rank says. Raises JoinError, on all ranks, where it can't be one of this group."""
        if "member" in message:
            member = Member.from_json(message["member"])
            self.roster.enter(member)
            if member.world_size != self.launch.world_size:
                raise self._refuse(
                    f"rank {member.rank} on {member.place} was started with WORLD_SIZE={member.world_size}, rank 0 on "
                    f"{self.me.place} with WORLD_SIZE={self.launch.world_size}. Set the same on all ranks.",
                )
        elif "call" in message:
            self.roster.answer(message["token"], message["call"])
            self._settings.update(message.get("settings", {}))
        elif "over" in message:
            self._asked_s = message["over"]

    def _judge(self) -> list[Member] | None:
        """The members, once every rank is alive at the same time; None before that. Raises UserError or JoinError, on
        all ranks, where these ranks make no group."""
        now_s = time.monotonic()
        if self._asked_s is not None and now_s - self._told_s > TELL_S:
            text = self._missing_at_deadline(self._asked_s)
            self._say({"missing": {"text": text, "speakers": speakers(self.roster.living())}})
            self._asked_s, self._told_s = None, now_s
        if claims := self.roster.claimed_twice():
            raise self._refuse(describe_claims(claims))
        # Just before the deadline as well, to find out who is alive still
        last_call = now_s > self.wait.deadline_s - LAST_CALL_S > self.roster.called_s
        if self.roster.call_due or last_call:
            self._call([])
        if not self.roster.all_here:
            return None
        members = self.roster.present()
        holders = {member.digest: member.token for member in members}  # one rank for each version of the settings
        if unknown := [token for digest, token in holders.items() if digest not in self._settings]:
            self._call(unknown)
            return None
        if len(holders) > 1:
            raise self._refuse(describe_differences(members, self._settings), code=USER_MISTAKE)
        return members

    def _call(self, unknown: list[str]) -> None:
        """Call the roll. The processes with these tokens shall send their settings too."""
        self._say({"call": self.roster.call(), "settings": unknown})

    def _say(self, word: Mapping[str, Any]) -> None:
        self._words += 1
        say(self.generation, self._words, word)

    def _announce(self, members: list[Member]) -> dict[str, Any]:
        """Tell all ranks that there is a group, and leave in the store who they are."""
        said = {
            "attempt": self.attempt, "restarted": any(member.restarts for member in members),
            "paths": asdict(Paths.of(members)), "speakers": speakers(members),
        }
        # One request for all of them
        names, texts = [keys.member(m.rank) for m in members], [m.to_json() for m in members]
        self.generation.multi_set(names, texts)  # type: ignore[attr-defined]
        self._say({"group": said})
        return said

    def _refuse(self, text: str, *, code: int = JOIN_FAILED) -> Exception:
        """The error that says why there will be no group, once all ranks had the time to read it."""
        living = self.roster.living()
        refusal = {"code": code, "text": text, "speakers": speakers(living)}
        self._say({"refused": refusal})
        until_s, left = time.monotonic() + READ_S, len(living) - 1
        # This process may host the store: it goes once the others have read
        while left > 0 and (left_s := until_s - time.monotonic()) > 0:
            left -= sum("read" in message for message in self.inbox.collect(left_s))
        return self.error_of(refusal)

    def _missing(self, waited_s: float) -> str:
        return describe_missing(
            self.roster.living(), self.roster.gone(), world_size=self.launch.world_size,
            local_world_size=self.launch.local_world_size, waited_s=waited_s,
        )

    def _missing_at_deadline(self, waited_s: float) -> str:
        where = "file" if self.launch.file else "MASTER_ADDR, MASTER_PORT"
        return f"{self._missing(waited_s)}. Was every process started, with this {where} and WORLD_SIZE?"
