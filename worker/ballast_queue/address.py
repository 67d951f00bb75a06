"""Parse the URL of a Redis or Valkey server.

A URL may hold a password, so an error of this module never quotes any part of it. It names what is wrong in a fixed
sentence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, unquote, urlsplit, urlunsplit

from ballast_queue.errors import InvalidAddress

TLS = "rediss"
NETWORK = ("redis", TLS)
LOCAL = "unix"
FORMS = "redis://user:password@host:port/database, rediss://host:port (TLS) or unix:///path"
_DATABASE = re.compile(r"(/(\d+/?)?)?", re.ASCII)
_STRICT_OPTIONS = frozenset({"db", "ssl_ca_data", "ssl_cert_reqs", "ssl_check_hostname"})
"""Options that neither open a file nor change a timeout."""
_TARGETS = frozenset({"host", "port", "path", "username", "password", "connection_class"})
"""Options that would replace another part of the URL."""


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A checked URL."""

    url: str = field(repr=False)
    scheme: str
    host: str
    """Empty for a Unix socket."""


def with_user(url: str, user: str) -> str:
    """Return a URL with another user and no password.

    Raises:
        InvalidAddress: the URL is malformed, so its password cannot be separated. The message quotes nothing of it.
    """
    parse_address(url)
    parts = urlsplit(url)
    if parts.scheme in NETWORK and not parts.hostname:
        raise InvalidAddress(f"Redis URL: the host is missing: use {FORMS}")
    place = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{quote(user, safe='')}@{place}"))


def parse_address(url: str, *, is_strict: bool = False) -> RedisAddress:
    """Check a URL. A strict check admits `redis` and `rediss` only, and only options that have no effect elsewhere.

    Raises:
        InvalidAddress: the URL is malformed. The message quotes nothing of it.
    """
    problem = _find_problem(url, is_strict=is_strict)
    if problem:
        wanted = FORMS.rpartition(" or ")[0] if is_strict else FORMS
        raise InvalidAddress(f"Redis URL: {problem}: use {wanted}")
    parts = urlsplit(url)
    return RedisAddress(url, parts.scheme, unquote(parts.hostname or "localhost") if parts.scheme != LOCAL else "")


def _find_problem(url: str, *, is_strict: bool) -> str:
    """Return the first problem, or an empty text. An exception of a parser would quote the URL."""
    if not url.startswith(tuple(f"{scheme}://" for scheme in NETWORK)) and (
        is_strict or not url.startswith(f"{LOCAL}://")
    ):
        return f"the scheme is not {'redis or rediss' if is_strict else 'redis, rediss or unix'}"
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        host = parts.hostname
    except ValueError:
        return "the host is malformed"
    if parts.netloc and "@" in f"{parts.path}{parts.query}{parts.fragment}":
        return "the password contains / ? or # (write %2F, %3F or %23), or an option contains @ (write %40)"
    if parts.fragment:
        return "the URL contains # (write %23)"
    try:
        parts.port  # noqa: B018  computed, and raises
    except ValueError:
        return "the port is not a number from 0 to 65535"
    if parts.scheme in NETWORK and not _DATABASE.fullmatch(parts.path):
        return "the database is not a number"  # the client of Redis would use 0
    if is_strict and not host:
        return "the host is missing"
    if _TARGETS & options.keys() or (is_strict and options.keys() - _STRICT_OPTIONS):
        return "an option after ? is not admitted"
    return ""
