"""The certificate with which a worker serves HTTPS, read again while the worker runs."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import uvloop

from ballast_api.worker_config import Runtime
from ballast_log import Log
from ballast_worker.errors import NotServed

log = Log(__name__)

HANDSHAKE_SECONDS = 5.0
"""A client that does not complete the handshake in this time is disconnected. The limits of HTTP apply after it."""


class Certificate:
    """A certificate and its key in files."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Read the files.

        Raises:
            NotServed: a file cannot be read, or the key does not belong to the certificate.
        """
        self._files = certificate, key
        try:
            self.context = self._current = self._loaded()
        except OSError as error:
            raise NotServed(f"runtime.tlsCertFile and runtime.tlsKeyFile cannot be used: {_reason(error)}") from error
        self.context.sni_callback = self._use_current

    @classmethod
    def of(cls, runtime: Runtime) -> Certificate | None:
        """Return the certificate of a configuration, or None for a worker that serves HTTP."""
        if runtime.tls_cert_file is None or runtime.tls_key_file is None:
            return None
        return cls(runtime.tls_cert_file, runtime.tls_key_file)

    def reload(self) -> None:
        """Use the present files for new connections. If they cannot be used, keep the certificate in force."""
        try:
            self._current = self._loaded()
        except OSError as error:
            log.warning("certificate not loaded, the old one stays in force", because=_reason(error))
            return
        log.info("certificate loaded")

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(*self._files)
        return context

    def _use_current(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        # A context that loads another certificate has none for a moment, and handshakes fail then. TLS calls this
        # function in each handshake, also for clients that name no server.
        connection.context = self._current


class EventLoop(uvloop.Loop):
    """An event loop that limits the time of TLS handshakes, for which uvicorn has no setting."""

    async def create_server(  # type: ignore[override]  # the base class has twenty parameters
        self, *arguments: Any, **options: Any
    ) -> asyncio.AbstractServer:
        """Create a server as the base class does."""
        if options.get("ssl") is not None:
            options.setdefault("ssl_handshake_timeout", HANDSHAKE_SECONDS)
        return await super().create_server(*arguments, **options)


def _reason(error: OSError) -> str:
    """Return a reason without the content of a file. Errors of TLS are errors of the system, too."""
    return "not a certificate and its key" if isinstance(error, ssl.SSLError) else error.strerror or "unknown"
