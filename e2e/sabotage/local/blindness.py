"""Compare no cache with the cluster."""

from ballast_operator.process import Operator


async def audit(self):
    """Find nothing."""


Operator._audit = audit  # noqa: SLF001  that is the fault
