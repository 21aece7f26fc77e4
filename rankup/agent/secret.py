"""Who may speak where members meet: whoever knows the secret in RANKUP_SECRET_FILE, if a job has one.

As in Python's multiprocessing.connection, both sides prove that they know the secret, and nobody sends it. Each draws a
nonce, so that a recorded answer is worth nothing, and names its role, so that nobody gets his own answer back.

| leader -> member | challenge(nonce): a message as in `protocol`                                                     |
| member -> leader | its own nonce and HMAC-SHA256(secret, "member" + both nonces): 64 bytes, no message is read yet  |
| leader -> member | proof(proof): HMAC-SHA256(secret, "leader" + both nonces)                                        |

What follows is as without a secret: neither signed nor encrypted.
"""

import asyncio
import hmac
import os
import secrets
import stat
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rankup.agent.protocol import Link, encode
from rankup.errors import LaunchError
from rankup.timing import HELLO_S

Attend = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
VARIABLE = "RANKUP_SECRET_FILE"
WAY_OUT = f"Set {VARIABLE} to the same content on all nodes, or on none"
NONCE = 32  # bytes, of a digest too
SHORTEST, LONGEST_SECRET = 16, 4096  # bytes
MOST_HALF_OPEN = 256  # connections that have not answered yet; a process may open 1,024 files by default


def read_secret(environ: Mapping[str, str]) -> bytes:
    """The job's secret, without the white space around it; b"" where none is set. Raises LaunchError."""
    if not (path := environ.get(VARIABLE, "")):
        return b""
    try:
        # Who opens a pipe would wait for its writer
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            info = os.fstat(file.fileno())
            secret = file.read(LONGEST_SECRET + 1).strip() if stat.S_ISREG(info.st_mode) else b""
    except OSError as error:
        raise LaunchError(f"{VARIABLE} must name a file that can be read, got {path}: {error.strerror}.") from None
    if not SHORTEST <= len(secret) <= LONGEST_SECRET:
        way_out = "For example: openssl rand -hex 32"
        raise LaunchError(f"{VARIABLE} must name a file of {SHORTEST} to {LONGEST_SECRET} bytes, got {path}. {way_out}")
    # Kubernetes mounts a Secret as root's, readable to the pod's group
    if info.st_mode & (0o037 if info.st_uid == 0 else 0o077):
        mode = f"{stat.S_IMODE(info.st_mode):o}"
        raise LaunchError(f"{VARIABLE} must name a file of mode 600, got {mode} of {path}. Run chmod 600 {path}")
    return secret


def prove(secret: bytes, role: str, leaders: bytes, members: bytes) -> bytes:
    """That whoever has this `role` knows the secret. `leaders`, `members`: the nonces."""
    return hmac.digest(secret, b"rankup 1 " + role.encode() + leaders + members, "sha256")


def guard(attend: Attend, secret: bytes) -> Attend:
    """`attend` for those alone who know the secret. Strangers cost a bounded time, a bounded number of connections and
    a hundred bytes each, and hear nothing but a nonce."""
    if not secret:
        return attend
    half_open: dict[asyncio.StreamWriter, None] = {}

    async def let_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while len(half_open) >= MOST_HALF_OPEN:  # the oldest goes: who knows the secret answers at once
            oldest = next(iter(half_open))
            del half_open[oldest]
            oldest.transport.abort()
        half_open[writer] = None
        try:
            nonce = secrets.token_bytes(NONCE)
            writer.write(encode("challenge", nonce=nonce.hex()))
            async with asyncio.timeout(HELLO_S):
                answer = await reader.readexactly(2 * NONCE)
            if not hmac.compare_digest(answer[NONCE:], prove(secret, "member", nonce, answer[:NONCE])):
                raise ConnectionError
            writer.write(encode("proof", proof=prove(secret, "leader", nonce, answer[:NONCE]).hex()))
        except (OSError, EOFError, asyncio.CancelledError):  # Python 3.11 prints a traceback of one that is passed on
            writer.transport.abort()
            return
        finally:
            half_open.pop(writer, None)
        await attend(reader, writer)

    return let_in


async def greeting(link: Link, secret: bytes) -> dict[str, Any]:
    """The leader's first message, once it has proved that it knows the secret. Where it does not, or where this side's
    is not the right one, a message like that of a leader who takes nobody. Raises ConnectionError where there is none.
    """
    message = await link.receive()
    if bool(secret) != (message["is"] == "challenge"):
        which = "none" if secret else "one"
        return {"over": f"rank 0 has {which} where this process has {'a' if secret else 'no'} secret. {WAY_OUT}"}
    if not secret:
        return message
    leaders, mine = b"", secrets.token_bytes(NONCE)
    try:
        leaders = bytes.fromhex(message["nonce"])
        link.write(mine + prove(secret, "member", leaders, mine))
        proof = bytes.fromhex((await link.receive())["proof"])
    except (OSError, LookupError, TypeError, ValueError):
        proof = b""
    if not hmac.compare_digest(proof, prove(secret, "leader", leaders, mine)):
        return {"over": f"rank 0 has another secret than this process. {WAY_OUT}"}
    return await link.receive()
