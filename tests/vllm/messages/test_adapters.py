"""A tenant finds only the adapters that it may use."""

from __future__ import annotations

import pytest

from ballast_api.sections import Adapter
from ballast_policy.request import RequestClass
from ballast_vllm.adapters import TenantAdapters
from ballast_vllm.calls import CALL, Call
from ballast_worker.openai import Caller
from ballast_worker.requests import RequestTiming


def make_adapters() -> TenantAdapters:
    configured = [
        Adapter(name="open", uri="file:///open"),
        Adapter(name="closed", uri="file:///closed", tenants=("legal",)),
    ]
    return TenantAdapters({"open": 1, "closed": 2}, configured)


def found(tenant: str | None) -> dict[str, object]:
    """Return what vLLM finds for a request of a tenant, in each way that it looks."""
    adapters = make_adapters()
    caller = Caller(tenant or "", RequestClass.ONLINE, 0, None, None)
    token = CALL.set(None if tenant is None else Call(caller, RequestTiming(RequestClass.ONLINE, 0.0)))
    try:
        names = [name for name in ("open", "closed", "none") if name in adapters]
        assert [adapters[name] for name in names] == list(adapters.values())
        assert [adapters.get(name) for name in names] == list(adapters.values())
        return {name: adapters[name] for name in names}
    finally:
        CALL.reset(token)


def test_an_adapter_exists_only_for_its_tenants() -> None:
    assert found("legal") == {"open": 1, "closed": 2}
    assert found("research") == {"open": 1}


def test_all_adapters_exist_outside_a_request() -> None:
    assert found(None) == {"open": 1, "closed": 2}
    assert list(make_adapters()) == ["open", "closed"]


def test_an_adapter_of_others_is_an_unknown_name() -> None:
    adapters = make_adapters()
    token = CALL.set(
        Call(Caller("research", RequestClass.ONLINE, 0, None, None), RequestTiming(RequestClass.ONLINE, 0))
    )
    try:
        with pytest.raises(KeyError, match="closed"):
            adapters["closed"]
        assert adapters.get("closed", "nothing") == "nothing"
    finally:
        CALL.reset(token)
