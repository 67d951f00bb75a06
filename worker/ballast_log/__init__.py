"""Logs of every Ballast process: events with fields, as text or as JSON.

Law: an event is a constant, and everything that varies is a field. Imports the standard library only.
"""

from ballast_log.log import Log, configure, configure_packages

__all__ = ["Log", "configure", "configure_packages"]
