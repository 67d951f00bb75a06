"""Translate failures of a server, or of the way to it, into errors of this package.

The texts of redis-py quote what the server answered and where the URL points. A URL may hold a password, and a URL of
somebody else may point anywhere. A message is therefore a fixed sentence with a reason from the tables below.
"""

from __future__ import annotations

import socket
import ssl

from redis import exceptions as refusals

from ballast_queue.errors import (
    CommandForbidden,
    CommandMissing,
    QueueError,
    QueueForbidden,
    QueueFull,
    QueueUnavailable,
    RefusedCall,
)
from ballast_queue.reply_limits import ReplyTooLarge

_KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (ssl.SSLCertVerificationError, "its TLS certificate is not trusted"),
    (ssl.SSLError, "TLS failed"),
    (socket.gaierror, "the host name is unknown"),
    (ConnectionRefusedError, "the connection was refused"),
    (FileNotFoundError, "a file or socket does not exist"),
    (PermissionError, "a file or socket must not be opened"),
    (refusals.TimeoutError, "no answer in time"),
    (TimeoutError, "no answer in time"),
    (refusals.BusyLoadingError, "it loads its data"),
    (refusals.MasterDownError, "it lost its primary"),
    (refusals.ClusterDownError, "the cluster is down"),
    (refusals.TryAgainError, "the cluster moves keys"),
    (refusals.RedisClusterException, "the cluster is not complete"),
    (refusals.ConnectionError, "the connection broke"),
    (OSError, "the connection broke"),
)
"""Reasons by the type of the failure or of its cause. The first match counts."""
_PASSING = {
    "BUSY": "it runs a long script",
    "UNBLOCKED": "it ended a wait",
    "NOREPLICAS": "too few replicas are up",
    "MISCONF": "it cannot save its data",
}
"""Reasons by the code of an error reply that means a passing condition. For other codes, redis-py has types."""

_MOST_CAUSES = 8

STRICT = (
    "Redis cannot be used with this URL, user and password: check all three, and that Redis runs and is reachable "
    "from here"
)
"""One sentence for every failure before authentication. Different ones would tell open ports from closed ones."""


def failure_of(error: Exception) -> QueueError:
    """Return the error of this package that describes a failure of redis-py. It quotes nothing and has no cause."""
    if is_refused_command(error):
        return CommandForbidden("Redis refused a command to this user: check the ACL rules of the user")
    if _is_unknown_command(error):
        return CommandMissing(
            "Redis does not know a command that Ballast needs: check that the server does not disable or rename it"
        )
    if isinstance(error, refusals.AuthenticationError | refusals.AuthorizationError):
        return QueueForbidden("Redis refused this user: check user name and password")
    if isinstance(error, refusals.OutOfMemoryError):
        return QueueFull(
            "Redis has no memory left: raise maxmemory, delete jobs, or wait until the results of old jobs expire"
        )
    if isinstance(error, ReplyTooLarge):
        return RefusedCall(
            "Redis sent a reply above the limit of this connection: check that only Ballast writes to the queue's keys"
        )
    if isinstance(error, refusals.ReadOnlyError):
        return _unavailable("it accepts no writes, because it is a replica", "use the address of its primary")
    code = _code_of(error)
    if code in _PASSING:
        return _unavailable(_PASSING[code])
    chain = _causes(error)
    for kind, reason in _KINDS:
        if any(isinstance(found, kind) for found in chain):
            return _unavailable(reason)
    if isinstance(error, refusals.ResponseError):
        reason = "a key has another type" if code == "WRONGTYPE" else "another error"
        return RefusedCall(f"Redis refused a call ({reason}): check that only Ballast writes to the keys of the queue")
    return _unavailable("the answer is not one of Redis")


def is_refused_command(error: Exception) -> bool:
    """Return whether the server knows the user, and the user may not run a command, or not on a key."""
    if isinstance(error, refusals.NoPermissionError):
        return True
    text = str(error)  # a function that calls a forbidden command fails with another type and text
    return isinstance(error, refusals.ResponseError) and ("NOPERM" in text or "permission" in text.lower())


def _is_unknown_command(error: Exception) -> bool:
    """Return whether the server lacks a command. Managed servers do not have `ACL`, and others rename commands.

    It is no sign that the server knows the user: Redis answers so before authentication, too.
    """
    text = str(error).lower()
    return isinstance(error, refusals.ResponseError) and text.startswith(("unknown command", "unknown subcommand"))


def _unavailable(reason: str, advice: str = "check that it runs and is reachable from here") -> QueueUnavailable:
    return QueueUnavailable(f"Redis is unavailable ({reason}): {advice}; nothing is lost, so repeat the call")


def _code_of(error: Exception) -> str:
    """Return the first word of an error reply, for a look-up only."""
    return str(error).partition(" ")[0] if isinstance(error, refusals.ResponseError) else ""


def _causes(error: Exception) -> list[BaseException]:
    """Return the failure and its causes. An error reply has none."""
    chain: list[BaseException] = [error]
    while len(chain) < _MOST_CAUSES and not isinstance(error, refusals.ResponseError):
        before = chain[-1].__cause__ or chain[-1].__context__
        if before is None:
            break
        chain.append(before)
    return chain
