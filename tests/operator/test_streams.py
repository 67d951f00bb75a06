"""The private function of Kopf that the operator replaces."""

from __future__ import annotations

from kopf._cogs.clients import watching

from ballast_operator import streams


def test_kopf_still_watches_through_the_replaced_function() -> None:
    """`infinite_watch` looks the function up in its module at each call, so that a replacement takes effect."""
    assert "continuous_watch" in watching.infinite_watch.__code__.co_names
    assert streams.continuous_watch.__module__ == watching.__name__
    assert "resource" in streams.continuous_watch.__code__.co_varnames
    assert watching.Bookmark.LISTED
