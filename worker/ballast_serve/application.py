"""The Serve application. `ballast_api.serve_config` makes the configuration that names `build` and all options."""

from __future__ import annotations

import asyncio

from ray import serve
from ray.serve import Application

from ballast_serve.replica import ServeReplica
from ballast_worker.tls import EventLoop


class _EventLoops(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return EventLoop()


# Serve makes the event loop of a replica after it has imported this module. Its own kind takes more CPU for each token,
# and gives TLS handshakes a minute.
asyncio.set_event_loop_policy(_EventLoops())


class RayReplica(ServeReplica):
    """The replica. It belongs to this module, so that each process that runs one imports the module."""


# The first argument of `ingress` is the app. Without it, Serve asks the replica for its app.
worker = serve.deployment(name="worker")(serve.ingress()(RayReplica))


def build(_arguments: dict[str, str]) -> Application:
    """Return the application. Its arguments are a hash of the fields that are not hot: Serve restarts it for others."""
    return worker.bind()
