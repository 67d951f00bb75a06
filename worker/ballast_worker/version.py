"""The versions of installed packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
