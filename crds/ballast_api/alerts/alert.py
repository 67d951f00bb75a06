"""An alert, and the rule that Prometheus reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["critical", "warning"]
"""`critical` pages a person at once, `warning` can wait until the morning."""
RuleJson = dict[str, Any]
"""A rule or a group of rules, as Prometheus reads it."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert.

    Attributes:
        alert: Name of the alert.
        severity: The label `severity`.
        lasting: Time that the expression must hold.
        expression: PromQL expression.
        summary: One line for a pager.
        meaning: Sentences that explain the alert.
        page: Name of the runbook page.
    """

    alert: str
    severity: Severity
    lasting: str
    expression: str
    summary: str
    meaning: str
    page: str

    def rule(self, ids: dict[str, str], runbooks: str | None) -> RuleJson:
        """Return the alert as Prometheus reads it, with the labels `ids`, and without a link if `runbooks` is None."""
        lasting = {} if self.lasting == "0s" else {"for": self.lasting}
        return {
            "alert": self.alert,
            "expr": self.expression,
            **lasting,
            "labels": ids | {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.meaning,
                **({"runbook_url": f"{runbooks.rstrip('/')}/{self.page}.md"} if runbooks else {}),
            },
        }
