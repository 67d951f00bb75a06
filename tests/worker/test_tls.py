"""A worker serves HTTPS with a certificate from files, and takes up new ones while it runs."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from files import swap
from streamed import BODY
from tls import LOOPBACK, OTHER, certificate_of, shown

from ballast_worker.errors import NotServed
from ballast_worker.tls import HANDSHAKE_SECONDS, Certificate


def put(pem: Path, *files: Path) -> None:
    for file in files:
        swap(file, pem.read_text())


@pytest.mark.slow
def test_a_worker_serves_https_and_takes_up_a_new_certificate(
    run_worker: Any, make_config: Any, tmp_path: Path, eventually: Any
) -> None:
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    put(LOOPBACK, certificate, key)
    runtime = {"tlsCertFile": str(certificate), "tlsKeyFile": str(key), "metricsPort": 0, "drainSeconds": 1}
    with run_worker(make_config(runtime=runtime), tmp_path) as worker:
        port = int(worker.url.rpartition(":")[2])
        trusted = ssl.create_default_context(cafile=str(LOOPBACK))
        with httpx.Client(base_url=f"https://localhost:{port}", verify=trusted, timeout=60) as client:
            status = client.post("/v1/completions", json=BODY).status_code
            lines = client.post("/v1/completions", json=BODY | {"stream": True}).text
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"http://localhost:{port}/health", timeout=20)
            first = shown(port)
            put(Path(__file__), certificate, key)
            eventually(lambda: "certificate not loaded" in worker.log, "the worker to refuse what is no certificate")
            still = shown(port)
            put(OTHER, certificate, key)
            eventually(lambda: shown(port) == certificate_of(OTHER), "the new certificate")
            kept = client.get("/health").status_code, worker.process.poll()
        started = [json.loads(line) for line in worker.lines if line.startswith("{")]
        listening = {entry["event"]: entry["address"] for entry in started if "listening" in entry["event"]}

    assert (status, kept) == (200, (200, None)), "the connection from before stays"
    assert "[DONE]" in lines
    assert first == still == certificate_of(LOOPBACK)
    assert {address.partition(":")[0] for address in listening.values()} == {"https"}
    assert len(listening) == 2


@pytest.mark.slow
def test_a_client_that_does_not_complete_the_handshake_is_disconnected(
    run_worker: Any, make_config: Any, tmp_path: Path
) -> None:
    runtime = {"tlsCertFile": str(LOOPBACK), "tlsKeyFile": str(LOOPBACK)}
    with run_worker(make_config(runtime=runtime), tmp_path) as worker:
        address = ("127.0.0.1", int(worker.url.rpartition(":")[2]))
        with socket.create_connection(address, timeout=20 * HANDSHAKE_SECONDS) as silent:
            assert silent.recv(1) == b"", "the server closes it"
        assert shown(address[1]) == certificate_of(LOOPBACK)


def handshake(served: ssl.SSLContext) -> bytes:
    """Return the certificate that a client gets in a handshake in memory."""
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname, client_context.verify_mode = False, ssl.CERT_NONE
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = served.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return client.getpeercert(binary_form=True) or b""


def test_a_handshake_succeeds_while_a_new_certificate_is_read(tmp_path: Path) -> None:
    file, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    put(LOOPBACK, file, key)
    certificate = Certificate(file, key)
    put(OTHER, file)
    key.unlink()
    os.mkfifo(key)
    reload = threading.Thread(target=certificate.reload)
    reload.start()
    with key.open("w") as half_read:  # returns when the reload has the certificate and opens the key
        shown_meanwhile = handshake(certificate.context)
        half_read.write(OTHER.read_text())
    reload.join()

    assert shown_meanwhile == certificate_of(LOOPBACK)
    assert handshake(certificate.context) == certificate_of(OTHER)


def test_files_that_are_no_certificate_are_refused_without_their_content(tmp_path: Path) -> None:
    wrong = tmp_path / "tls.crt"
    wrong.write_text("hunter2")
    for certificate in (wrong, tmp_path / "absent"):
        with pytest.raises(NotServed, match=r"runtime\.tlsCertFile and runtime\.tlsKeyFile cannot be used") as caught:
            Certificate(certificate, LOOPBACK)
        assert "hunter2" not in str(caught.value)
