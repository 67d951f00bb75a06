"""The plan of a step reserves nothing for offline; what the worker reports of its reservation stays as it was."""

from dataclasses import replace

from ballast_policy.host import Host
from ballast_policy.reservation import Reservation

_snapshot = Host.snapshot
Host.snapshot = lambda self, kv, now: replace(_snapshot(self, kv, now), reservation=Reservation())
