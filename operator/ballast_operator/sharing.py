"""The resources whose queue has the same name. PURE."""

from __future__ import annotations

from functools import cached_property

from ballast_operator.kinds import Body


class Sharing(tuple[Body, ...]):  # noqa: SLOT001  it keeps the grants
    """The resources whose queue has the same name, in whichever Redis."""

    @cached_property
    def grants(self) -> frozenset[tuple[str, str]]:
        """Return each namespace that grants the queue, with one to which it does so."""
        return frozenset(
            (body["metadata"]["namespace"], namespace)
            for body in self
            if not body["metadata"].get("deletionTimestamp")
            for namespace in ((body.get("spec") or {}).get("queueAccess") or {}).get("namespaces") or ()
        )
