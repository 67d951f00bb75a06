"""The LoRA adapters of vLLM, and the tenants that may use them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ballast_api.sections import Adapter
from ballast_vllm.calls import CALL


class TenantAdapters(dict[str, Any]):
    """vLLM's adapters by name. For a request of a tenant that may not use an adapter, the adapter does not exist.

    vLLM looks up the model of each request here, so it answers with its own error for an unknown model. Outside a
    request, all adapters exist.
    """

    def __init__(self, adapters: dict[str, Any], configured: Iterable[Adapter]) -> None:
        super().__init__(adapters)
        self._tenants = {
            adapter.name: frozenset(tenants) for adapter in configured if (tenants := adapter.tenants) is not None
        }

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) and self._may_use(name)

    def __getitem__(self, name: str) -> Any:
        if not self._may_use(name):
            raise KeyError(name)
        return super().__getitem__(name)

    def values(self) -> Any:
        return [adapter for name, adapter in self.items() if self._may_use(name)]

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name, default) if self._may_use(name) else default

    def _may_use(self, name: object) -> bool:
        call = CALL.get()
        allowed = self._tenants.get(name) if isinstance(name, str) else None
        return call is None or allowed is None or call.caller.tenant in allowed
