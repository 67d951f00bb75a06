"""Clients of redis-py for an address: which hosts they reach, which authorities they trust, how large a reply may be.

A client repeats no call: the caller of a `Connection` decides whether to.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.retry import Retry

from ballast_queue.address import NETWORK, TLS, RedisAddress
from ballast_queue.errors import HostNotAdmitted, InvalidAddress, QueueForbidden
from ballast_queue.reply_limits import ReplyLimits, limited

Admits = Callable[[str], bool]
"""Return whether a connection to this host is allowed."""
Options = dict[str, Any]
"""Arguments of redis-py."""


def options_of(
    address: RedisAddress,
    *,
    password: str | None,
    socket_timeout: float,
    admits: Admits | None,
    ca: str | None,
    limits: ReplyLimits | None,
) -> Options:
    """Return the options of a client. Raise `QueueForbidden` if the certificates of authorities are not PEM."""
    options: Options = {"socket_timeout": socket_timeout, "protocol": 2}
    if address.scheme in NETWORK:
        options |= {"socket_connect_timeout": socket_timeout, "socket_keepalive": True}
        kind: type[redis.Connection] = redis.SSLConnection if address.scheme == TLS else redis.Connection
        kind = kind if admits is None else _admitting(kind, admits)
        options["connection_class"] = kind if limits is None else limited(kind, limits)
    if ca is not None and address.scheme == TLS:
        options["ssl_ca_data"] = _checked(ca)
    if password:
        options["password"] = password
    return options


def single(address: RedisAddress, options: Options) -> redis.Redis:
    """Return the client of one server. Raise `InvalidAddress` if an option of the URL is wrong."""
    try:
        return redis.Redis.from_url(address.url, retry=_never(), **options)
    except (ValueError, TypeError):
        pass  # the text quotes the URL
    raise InvalidAddress("Redis URL: an option after ? is unknown or has a wrong value: remove it")


def clustered(address: RedisAddress, options: Options) -> RedisCluster:
    """Return the client of a cluster. It connects to find the nodes, and raises the errors of redis-py."""
    # `rediss` in its URL would replace the class of connections, which is one for TLS already.
    return RedisCluster.from_url(address.url.replace("rediss:", "redis:", 1), retry=_never(), **options)


def _never() -> Retry:
    return Retry(NoBackoff(), 0)


def _checked(ca: str) -> str:
    """Return the certificates. The client of Redis would leave a socket open for each attempt with wrong ones."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=ca)
    except (ValueError, ssl.SSLError):
        pass  # the text quotes what was found
    else:
        return ca
    raise QueueForbidden("The certificates of authorities for Redis are not PEM. Write -----BEGIN CERTIFICATE----- ...")


def _admitting(kind: type[redis.Connection], admits: Admits) -> type[redis.Connection]:
    """Return a class of connections that connect to admitted hosts only, also where a cluster redirects the client."""

    class Admitted(kind):  # type: ignore[misc, valid-type]
        def _connect(self) -> Any:
            if not admits(self.host):
                raise HostNotAdmitted
            return super()._connect()

    return Admitted
