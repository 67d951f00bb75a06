"""One operator is active at a time, however long the API server takes to answer."""

from __future__ import annotations

import asyncio
import signal
from typing import Any, ClassVar, cast

import pytest
from kubernetes.aio.client import ApiException
from reconciled import make_operator

from ballast_operator import cluster, lease
from ballast_operator.errors import ClusterUnavailable, Conflict, Forbidden
from ballast_operator.kinds import LEASE, Body, Key, Kind
from ballast_operator.lease import DURATION_SECONDS, RENEW_WITHIN_SECONDS, Leadership
from ballast_operator.metrics import Metrics
from ballast_operator.process import LEADERSHIP_LOST, run
from ballast_operator.settings import OperatorSettings


class SilentCluster:
    """Never answers."""

    async def get(self, _key: Key) -> Body | None:
        await asyncio.Event().wait()
        return None

    async def plurals(self, _kind: Kind) -> frozenset[str]:
        await asyncio.Event().wait()
        return frozenset()


class LostLeadership:
    """Another operator is active."""

    async def keep(self) -> None:
        """Return at once."""


def test_the_lease_is_kept_while_the_first_calls_wait_for_their_answers() -> None:
    async def work() -> int:
        async with asyncio.timeout(5):
            return await make_operator(SilentCluster()).work(cast(Any, LostLeadership()))

    assert asyncio.run(work()) == LEADERSHIP_LOST


class KeptLeadership:
    """No other operator becomes active."""

    async def keep(self) -> None:
        await asyncio.Event().wait()


class ForbiddingCluster:
    """Forbids to read the Secret of Redis."""

    def __init__(self) -> None:
        self.was_asked = asyncio.Event()

    async def get(self, key: Key) -> Body | None:
        self.was_asked.set()
        raise Forbidden(f"get {key.path()}", 403, "secrets is forbidden")

    async def plurals(self, _kind: Kind) -> frozenset[str]:
        return frozenset()


def test_an_operator_that_cannot_read_its_own_secret_is_neither_ready_nor_active() -> None:
    async def work() -> list[str]:
        cluster, metrics = ForbiddingCluster(), Metrics()
        operator = make_operator(cluster, metrics=metrics, redis_secret="redis")
        found = [operator.unready()]
        working = asyncio.create_task(operator.work(cast(Any, KeptLeadership())))
        await cluster.was_asked.wait()
        await asyncio.sleep(0)
        found.append(operator.unready())
        working.cancel()
        assert b"ballast_operator_active 0.0" in metrics.text()
        return found

    on_standby, active = asyncio.run(work())

    assert not on_standby
    assert "get /api/v1/namespaces/ballast/secrets/redis: the API server answered 403" in active


class EmptyCluster:
    """Has no CRD."""

    def __init__(self) -> None:
        self.was_asked = asyncio.Event()

    async def plurals(self, kind: Kind) -> frozenset[str]:
        if not kind.is_optional:  # to find out whether it may be watched
            self.was_asked.set()
        return frozenset()


def test_an_operator_that_does_not_watch_a_kind_that_it_needs_is_not_active() -> None:
    async def work() -> tuple[str, str]:
        metrics, cluster = Metrics(), EmptyCluster()
        operator = make_operator(cluster, metrics=metrics, watch_namespaces="team")
        working = asyncio.create_task(operator.work(cast(Any, KeptLeadership())))
        await cluster.was_asked.wait()
        operator.refresh()
        found = operator.unready(), metrics.text().decode()
        working.cancel()
        return found

    why, text = asyncio.run(work())

    assert "not watched: InferenceDeployment" in why
    assert "ballast_operator_active 0.0" in text


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for nothing between two calls about the Lease."""
    for name in ("POLL_SECONDS", "RENEW_EVERY_SECONDS", "RENEW_AGAIN_SECONDS"):
        monkeypatch.setattr(lease, name, 0.0)


class SlowClock:
    """A clock that each write of the Lease moves on."""

    def __init__(self, *waits: float) -> None:
        self.now = 0.0
        self.waits = list(waits)
        self.leases: list[Body] = []

    def seconds(self) -> float:
        return self.now

    async def get(self, _key: Key) -> Body | None:
        return self.leases[-1] if self.leases else None

    async def create(self, _kind: Kind, body: Body) -> Body:
        self.now += self.waits.pop(0)
        self.leases.append(body | {"metadata": body["metadata"] | {"resourceVersion": str(len(self.leases))}})
        return self.leases[-1]

    async def replace(self, key: Key, body: Body) -> Body:
        return await self.create(key.kind, body)

    def lead(self, *, keep: bool = True) -> None:
        """Become active, and stay so until the Lease is lost."""
        leadership = Leadership(cast(Any, self), Key(LEASE, "ballast", "l"), "me", seconds=self.seconds)

        async def within_limit() -> None:
            async with asyncio.timeout(10):
                await leadership.acquire()
                if keep:
                    await leadership.keep()

        asyncio.run(within_limit())


def test_a_lease_whose_write_was_answered_late_is_renewed_before_the_operator_is_active() -> None:
    """It may have expired meanwhile."""
    slow = SlowClock(DURATION_SECONDS + 1, 0.5)
    slow.lead(keep=False)

    assert len(slow.leases) == 2


OTHER_DURATION_SECONDS = 20.0


class OtherHolder(SlowClock):
    """Another operator renews the Lease for a minute. Each read of the Lease takes five seconds.

    Its clock is far behind, and it is of a version whose Lease is valid for longer.
    """

    async def get(self, key: Key) -> Body | None:
        self.now += 5.0
        if self.now <= 60.0:
            metadata = {"resourceVersion": str(len(self.leases))}
            spec = {"holderIdentity": "other", "leaseDurationSeconds": OTHER_DURATION_SECONDS}
            spec["renewTime"] = "2000-01-01T00:00:00.000000Z"
            self.leases.append({"metadata": metadata, "spec": spec})
        return await super().get(key)


@pytest.mark.usefixtures("quick")
def test_a_lease_that_another_operator_renews_is_never_taken() -> None:
    """However long the election lasts."""
    other = OtherHolder(0.0)
    other.lead(keep=False)

    assert other.now == 60.0 + OTHER_DURATION_SECONDS


class LastAnswer(SlowClock):
    """Answers each write of the Lease late, and none after those."""

    sent = 0.0

    async def create(self, kind: Kind, body: Body) -> Body:
        if not self.waits:
            self.now += 1.0
            raise ClusterUnavailable("apply: the API server does not answer")
        self.sent = self.now
        return await super().create(kind, body)


@pytest.mark.usefixtures("quick")
def test_the_time_of_a_lease_begins_when_its_renewal_is_sent() -> None:
    """A replica on standby may see the renewal long before its answer arrives here."""
    last = LastAnswer(0.0, 8.0)
    last.lead()

    assert last.now - last.sent <= RENEW_WITHIN_SECONDS


class StillHeld(Exception):
    """The Lease was renewed after a renewal without an answer."""


class LostAnswer(SlowClock):
    """Writes the Lease for the fourth time without an answer."""

    async def replace(self, key: Key, body: Body) -> Body:
        if body["metadata"]["resourceVersion"] != self.leases[-1]["metadata"]["resourceVersion"]:
            raise Conflict(f"replace {key.path()}", 409, "the object has been modified")
        answer = await super().replace(key, body)
        if len(self.leases) == 4:
            raise ClusterUnavailable("replace: the API server does not answer")
        if len(self.leases) == 5:
            raise StillHeld
        return answer


@pytest.mark.usefixtures("quick")
def test_an_operator_whose_renewal_got_no_answer_reads_the_lease_and_stays_active() -> None:
    with pytest.raises(StillHeld):
        LostAnswer(0.0, 6.0, 6.0, 0.0, 0.0).lead()


class NoAnswer(SlowClock):
    """Answers each write of the Lease late, and then no more."""

    async def create(self, kind: Kind, body: Body) -> Body:
        if not self.waits:
            await asyncio.Event().wait()
        return await super().create(kind, body)


@pytest.mark.usefixtures("quick")
def test_a_renewal_that_waits_for_its_answer_ends_before_the_lease_does() -> None:
    NoAnswer(0.0, RENEW_WITHIN_SECONDS - 0.1).lead()


class OldAuthorities(SlowClock):
    """Trusts the API server after it has read the authorities again."""

    is_old = True

    async def get(self, key: Key) -> Body | None:
        if self.is_old:
            raise ClusterUnavailable("get: the API server does not answer (certificate verify failed)")
        return await super().get(key)

    async def connect(self) -> None:
        self.is_old = False


@pytest.mark.usefixtures("quick")
def test_a_replica_on_standby_follows_the_authorities_of_the_cluster() -> None:
    old = OldAuthorities(0.0)
    old.lead(keep=False)

    assert old.leases


class ClientOfOtherProgram:
    """A client of a server that answers with JSON, and is no API server."""

    def __init__(self, _configuration: object) -> None:
        self.user_agent = ""

    async def call_api(self, *_arguments: Any, **_options: Any) -> tuple[Body, int, Body]:
        return {"spec": {"holderIdentity": "other"}}, 200, {}

    async def close(self) -> None:
        """Do nothing."""


SETTINGS = OperatorSettings(namespace="ballast", worker_image="worker:1", host="127.0.0.1", port=0)


@pytest.mark.usefixtures("unreachable")
def test_an_election_that_fails_ends_the_operator_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "ListingClient", ClientOfOtherProgram)

    with pytest.raises(KeyError, match="metadata"):
        asyncio.run(run(SETTINGS))


class ClientOfOneThing:
    """A client of an API server where another operator becomes active after the first call about anything else."""

    used: ClassVar[list[set[bool]]] = []
    """Of each client, whether it was used for the Lease, and for anything else."""

    def __init__(self, _configuration: object) -> None:
        self.user_agent = ""
        self._used: set[bool] = set()
        self.used.append(self._used)

    async def call_api(self, path: str, method: str, **_options: Any) -> tuple[Body, int, Body]:
        is_lease = path.endswith("/leases") or "/leases/" in path
        self._used.add(is_lease)
        others = [used for used in self.used if False in used]
        lease = {"metadata": {"resourceVersion": "1"}, "spec": {"holderIdentity": "other" if others else ""}}
        if not is_lease:
            await asyncio.Event().wait()
        if method == "PUT" and others:
            raise ApiException(status=409, reason="Conflict")
        return lease, 200, {}

    async def close(self) -> None:
        """Do nothing."""


@pytest.mark.usefixtures("unreachable")
def test_the_lease_has_connections_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other calls, such as Events that are not answered, may take all connections of the other client."""
    monkeypatch.setattr(cluster, "ListingClient", ClientOfOneThing)
    monkeypatch.setattr(ClientOfOneThing, "used", [])
    monkeypatch.setattr(lease, "RENEW_EVERY_SECONDS", 0.01)

    assert asyncio.run(run(SETTINGS)) == LEADERSHIP_LOST
    assert ClientOfOneThing.used == [{True}, {False}]


class ClientAtTheEnd:
    """A client of an operator that gets a signal during its first call about anything but the Lease."""

    steps: ClassVar[list[str]] = []

    def __init__(self, _configuration: object) -> None:
        self.user_agent = ""

    async def call_api(
        self, path: str, method: str, *, body: Body | None = None, **_options: Any
    ) -> tuple[Body, int, Body]:
        if "/leases" not in path:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.Event().wait()
        found = body or {"metadata": {"resourceVersion": "1"}, "spec": {}}
        if method == "PUT" and not found["spec"]["holderIdentity"]:
            self.steps.append("released")
        return found, 200, {}

    async def close(self) -> None:
        self.steps.append("closed")


@pytest.mark.usefixtures("unreachable")
def test_the_lease_is_released_before_the_last_events_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "ListingClient", ClientAtTheEnd)
    monkeypatch.setattr(ClientAtTheEnd, "steps", [])

    assert asyncio.run(run(SETTINGS)) == 0
    assert ClientAtTheEnd.steps == ["released", "closed", "closed"]
