"""The Serve application. `ballast_api.serve_config` makes the configuration that names `build` and all options."""

from __future__ import annotations

from typing import TypedDict

from ray import serve
from ray.serve import Application

from ballast_serve.replica import ServeReplica


class Arguments(TypedDict):
    """The `args` of the application."""

    cold_fields: str
    """A hash of the fields that are not hot. Serve restarts the replicas when it changes."""


# The first argument of `ingress` is the app. Without it, Serve asks the replica for its app.
worker = serve.deployment(name="worker")(serve.ingress()(ServeReplica))


def build(_arguments: Arguments) -> Application:
    """Return the application."""
    return worker.bind()
