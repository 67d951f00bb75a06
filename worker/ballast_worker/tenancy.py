"""Determine tenant, class, priority and SLO of a request, from API key, headers and body.

The API key overrides the tenant header. If tenants are declared, all others are refused. A tenant's priority is capped.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from ballast_api.sections import MOST_CHARACTERS, Tenant, is_name
from ballast_policy.request import RequestClass
from ballast_queue.settings import MAX_PRIORITY, MIN_PRIORITY
from ballast_worker.errors import NO_OFFLINE, NotServed, Refused
from ballast_worker.openai import Caller

TENANT_HEADERS = (b"x-ballast-tenant", b"x-llm-d-inference-fairness-id", b"x-gateway-inference-fairness-id")
"""Names of one value. All but the first are those of llm-d, which a gateway may set or remove."""
PRIORITY_HEADER = b"x-ballast-priority"
CLASS_HEADER = b"x-ballast-class"
TTFT_HEADERS = (b"x-ballast-slo-ttft-ms", b"x-llm-d-slo-ttft-ms", b"x-slo-ttft-ms")
TPOT_HEADERS = (b"x-ballast-slo-tpot-ms", b"x-llm-d-slo-tpot-ms", b"x-slo-tpot-ms")

DEFAULT_TENANT = "default"

Headers = Mapping[bytes, bytes]


class ApiKeys:
    """The keys file: YAML from API key to tenant. Only hashes of keys are kept, so that no dump or trace has a key."""

    def __init__(self, tenants: Mapping[bytes, str]) -> None:
        self._tenants = dict(tenants)

    @classmethod
    def load(cls, path: Path) -> ApiKeys:
        """Read the file of API keys.

        Raises:
            NotServed: the message states what is wrong with it.
        """
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            # A YAML error quotes its line, which may have a key.
            shown = error.strerror if isinstance(error, OSError) else type(error).__name__
            raise NotServed(f"The API keys file {path} cannot be read ({shown}): write `key: tenant` lines") from error
        if not isinstance(data, dict):
            raise NotServed(
                f"The API keys file {path} is not a mapping: write one `key: tenant` line per key, or {{}} for no key"
            )
        tenants: dict[bytes, str] = {}
        for line, (key, tenant) in enumerate(data.items(), 1):
            if not isinstance(key, str) or not key.strip() or not isinstance(tenant, str) or not is_name(tenant):
                raise NotServed(
                    f"Entry {line} of the API keys file {path} is not `key: tenant` with both as text "
                    "(quote them), a key that is not blank, and a tenant of letters, digits and ._/-"
                )
            digest = _digest(key.strip())
            if digest in tenants:
                raise NotServed(
                    f"Entry {line} of the API keys file {path} has the key of an earlier entry: blanks around a key do "
                    "not count"
                )
            tenants[digest] = tenant
        return cls(tenants)

    def tenant_of(self, headers: Headers) -> str:
        """Return the tenant of the `Authorization: Bearer` key. Refuse a request without a known key with 401."""
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key:
            raise _unauthorized("This worker requires an API key: send `Authorization: Bearer <key>`.")
        tenant = self._tenants.get(hashlib.sha256(key.strip()).digest())
        if tenant is None:
            raise _unauthorized("The API key is unknown: check it, or ask the operator of this deployment for a key.")
        return tenant


class Tenancy:
    """Tenants and API keys of one configuration. A change of the configuration replaces the object."""

    def __init__(self, tenants: Sequence[Tenant], keys: ApiKeys | None, *, serves_offline: bool = True) -> None:
        self._declared = {tenant.name: tenant for tenant in tenants}
        self._keys = keys
        self._serves_offline = serves_offline

    def check_key(self, headers: Headers) -> None:
        """Refuse a request without a known key, if keys are required."""
        if self._keys is not None:
            self._keys.tenant_of(headers)

    def caller(self, headers: Headers, band: int = 0, *, is_flex: bool = False) -> Caller:
        """Return what headers and body state about the caller.

        `band` is the priority of the body, higher first; `is_flex` is its service tier. Headers override both.

        Raises:
            Refused: the message states what was found and what was expected.
        """
        tenant = self._tenant(headers)
        request_class = _request_class(headers, RequestClass.OFFLINE if is_flex else RequestClass.ONLINE)
        return Caller(
            tenant=tenant,
            request_class=request_class,
            priority=self.capped(tenant, _priority(headers, band)),
            ttft_seconds=_milliseconds(headers, TTFT_HEADERS),
            tpot_seconds=_milliseconds(headers, TPOT_HEADERS),
        )

    def check_offline(self, caller: Caller) -> None:
        """Refuse an offline request if none may run now: `offline.maxPercent` is hot, so 0 can be a pause."""
        if caller.request_class is RequestClass.OFFLINE and not self._serves_offline:
            raise Refused(
                503,
                "This deployment runs no offline requests now (offline.maxPercent is 0). Retry later, or send an "
                "online request.",
                code=NO_OFFLINE,
                kind="server_error",
                headers={"retry-after": "30"},
            )

    def capped(self, tenant: str, priority: int) -> int:
        """Return the priority, at most that of the tenant. With API keys, a tenant that is not declared has 0."""
        if declared := self._declared.get(tenant):
            return min(priority, declared.max_priority)
        return priority if self._keys is None else min(priority, 0)

    def num_before(self, tenant: str, waiting: Mapping[str, int]) -> tuple[float, float]:
        """Return two numbers of requests for a new request of the tenant, if slots go by weight.

        The first is how much of the queue the tenant fills, which is 0 if none of its requests waits:

            its waiting requests * weights of the tenants that wait, with this one / its weight

        The second is how many of the `waiting` requests get a slot before the new one:

            its waiting requests + sum over the others of
                min(waiting requests of the other, (its waiting requests + 1) * weight of the other / its weight)

        Without API keys, the clients choose their tenants, so both are inf.
        """
        if self._keys is None:
            return math.inf, math.inf
        own, num_own = self._weight(tenant), waiting.get(tenant, 0)
        others = [
            (self._weight(other) / own, number) for other, number in waiting.items() if number and other != tenant
        ]
        filled = num_own * (1 + sum(weight for weight, _ in others))
        return filled, num_own + sum(min(number, (num_own + 1) * weight) for weight, number in others)

    def _weight(self, tenant: str) -> float:
        declared = self._declared.get(tenant)
        return 1.0 if declared is None else declared.weight

    def _tenant(self, headers: Headers) -> str:
        if self._keys is not None:
            tenant = self._keys.tenant_of(headers)
        else:
            header, found = _only(headers, TENANT_HEADERS)
            tenant = found or DEFAULT_TENANT
            if not is_name(tenant):
                raise Refused(
                    400,
                    f"Header {header} is {tenant!r:.80}: a tenant's name has letters, digits and ._/-, "
                    f"at most {MOST_CHARACTERS} characters.",
                    code="invalid_tenant",
                )
        if self._declared and tenant not in self._declared:
            advice = (
                f"use a declared tenant in the header {TENANT_HEADERS[0].decode()}, or add this one to offline.tenants"
                if self._keys is None
                else "the API key belongs to it, so add it to offline.tenants, or use another key"
            )
            raise Refused(
                403,
                f"Tenant '{tenant}' is not declared in this deployment: {advice}.",
                code="unknown_tenant",
                kind="permission_error",
            )
        return tenant


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _unauthorized(message: str) -> Refused:
    return Refused(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def _text(headers: Headers, name: bytes) -> str:
    return headers.get(name, b"").decode("latin-1").strip()


def _only(headers: Headers, names: Sequence[bytes], *, is_number: bool = False) -> tuple[str, str]:
    """Return the first of the headers that a request has, and its text; "" if it has none.

    Refuse a request whose headers differ: a gateway may set one of them for clients, and a client may send another. The
    message has no value, because that of the gateway may be no business of the client.
    """
    found = [(name.decode(), text) for name in names if (text := _text(headers, name))] or [("", "")]
    for name, text in found[1:]:
        if text != found[0][1] and not (is_number and _number(text) == _number(found[0][1])):
            message = f"Headers {found[0][0]} and {name} differ: send one of them."
            raise Refused(400, message, code="conflicting_headers")
    return found[0]


def _number(text: str) -> float:
    """Return a number, or NaN, which equals nothing."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _request_class(headers: Headers, default: RequestClass) -> RequestClass:
    text = _text(headers, CLASS_HEADER).lower()
    try:
        return RequestClass(text) if text else default
    except ValueError:
        raise Refused(
            400,
            f"Header {CLASS_HEADER.decode()} is {text!r:.80}: send 'online' or 'offline'.",
            code="invalid_class",
        ) from None


def _priority(headers: Headers, band: int) -> int:
    text = _text(headers, PRIORITY_HEADER)
    if not text:
        return band
    if re.fullmatch(r"[+-]?\d{1,4}", text) and MIN_PRIORITY <= int(text) <= MAX_PRIORITY:
        return int(text)
    raise Refused(
        400,
        f"Header {PRIORITY_HEADER.decode()} is {text!r:.80}: send a whole number from {MIN_PRIORITY} to "
        f"{MAX_PRIORITY}; higher is more important, 0 is the default.",
        code="invalid_priority",
    )


def _milliseconds(headers: Headers, names: Sequence[bytes]) -> float | None:
    name, text = _only(headers, names, is_number=True)
    if not text:
        return None
    value = _number(text)
    if not (math.isfinite(value) and value > 0):
        raise Refused(400, f"Header {name} is {text!r:.80}: send milliseconds, a number above 0.", code="invalid_slo")
    return value / 1000
