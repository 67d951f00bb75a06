"""The ACL rules that the documentation names."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def documented_rules(queue: str, *, user: str = "worker") -> list[str]:
    """Return the rules of a user as docs/how-to/external-redis.md names them, without name and password."""
    text = (DOCS / "how-to" / "external-redis.md").read_text(encoding="utf-8")
    block = text.split(f"ACL SETUSER {user} on >PASSWORD", 1)[1].split("```")[0]
    return block.replace("\\\n", " ").replace("{QUEUE}", f"{{{queue}}}").split()
