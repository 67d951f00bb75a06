"""Certificates of a loopback server, and a server that speaks TLS in front of one that does not."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOPBACK = Path(__file__).parent / "loopback.pem"
"""Certificate and key of `localhost`, signed by itself."""
OTHER = LOOPBACK.with_name("loopback-2.pem")
"""Another such pair."""


def shown(port: int) -> bytes:
    """Return the certificate that a server on loopback shows, whoever signed it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), timeout=60) as plain, context.wrap_socket(plain) as found:
        return found.getpeercert(binary_form=True) or b""


def certificate_of(pem: Path) -> bytes:
    """Return the certificate of a file, as `shown` does."""
    text = pem.read_text()
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    return ssl.PEM_cert_to_DER_cert(text[text.index(begin) : text.index(end) + len(end)])


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def _pass_on(plain: socket.socket, context: ssl.SSLContext, backend: tuple[str, int]) -> None:
    try:
        client = context.wrap_socket(plain, server_side=True)
    except (ssl.SSLError, OSError):
        return
    with client, socket.create_connection(backend) as server:
        back = threading.Thread(target=_pump, args=(server, client), daemon=True)
        back.start()
        _pump(client, server)
        back.join()


@contextmanager
def tls_proxy(backend: tuple[str, int], context: ssl.SSLContext | None = None) -> Iterator[str]:
    """Pass connections on to a server. Yield the address as a URL of Redis. `context` may change its certificate."""
    context = context or ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(LOOPBACK)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=_pass_on, args=(plain, context, backend), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    with listener:
        yield f"rediss://localhost:{listener.getsockname()[1]}"
