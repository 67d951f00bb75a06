"""A tenant finds only the adapters that it may use."""

from __future__ import annotations

from contextvars import copy_context

import pytest

from ballast_api.sections import Adapter
from ballast_policy.request import RequestClass
from ballast_vllm.adapters import TenantAdapters
from ballast_vllm.calls import CALL, Call
from ballast_worker.openai import Caller
from ballast_worker.requests import RequestTiming

CONFIGURED = [
    Adapter(name="open", uri="file:///open"),
    Adapter(name="closed", uri="file:///closed", tenants=("legal",)),
]


@pytest.mark.parametrize(
    ("tenant", "names"),
    [("legal", ["open", "closed"]), ("research", ["open"]), (None, ["open", "closed"])],
    ids=["its tenant", "another tenant", "outside a request"],
)
def test_an_adapter_exists_only_for_its_tenants(tenant: str | None, names: list[str]) -> None:
    adapters = TenantAdapters({"open": 1, "closed": 2}, CONFIGURED)

    def look_up() -> None:
        """Find adapters in each way in which vLLM looks."""
        if tenant is not None:
            CALL.set(Call(Caller(tenant, RequestClass.ONLINE, 0), RequestTiming(RequestClass.ONLINE, 0.0)))
        hidden = [name for name in ("open", "closed", "none") if name not in adapters]
        assert [name for name in adapters if name not in hidden] == names
        assert [adapters[name] for name in names] == [adapters.get(name) for name in names] == list(adapters.values())
        for name in hidden:
            assert adapters.get(name, "nothing") == "nothing"
            with pytest.raises(KeyError, match=name):
                adapters[name]

    copy_context().run(look_up)
