"""A hub and an S3 store on loopback, with a small checkpoint each."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from ballast_cli.fetch import store

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b'{"model": {}}',
    "model.safetensors": bytes(range(256)) * 12_000,
    "README.md": b"# not needed\n",
    "consolidated.safetensors": b"the same once more",
    "original/params.json": b"{}",
    "pytorch_model.bin": b"pickle",
}


@dataclass
class FakeHub:
    """Speaks the hub's protocol: the model's listing, and its files with ranges."""

    files: dict[str, bytes] = field(default_factory=lambda: dict(FILES))
    token: str | None = None
    cut_after: int | None = None
    """Bytes after which a download breaks off, once per request, while it is set."""
    stall_after: int | None = None
    """Bytes after which a download stands still until `go_on`."""
    go_on: threading.Event = field(default_factory=threading.Event)
    damage: bool = False
    is_away: bool = False
    """Whether every request fails."""
    is_page: bool = False
    """Whether the answer is a page, as that of a proxy."""
    num_siblings: int = 0
    """Further files in the listing."""
    is_packed: bool = False
    """Whether the listing is compressed, whatever the client accepts."""
    redirects: dict[str, str] = field(default_factory=dict)
    """Files that another URL has."""
    announced: dict[str, int | None] = field(default_factory=dict)
    """Sizes in the listing that are wrong, or missing."""
    commit: str = COMMIT
    knows_ranges: bool = True
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and range of every request."""
    url: str = ""

    def listing(self, revision: str) -> dict[str, Any]:
        siblings = []
        for name, content in self.files.items():
            sibling: dict[str, Any] = {"rfilename": name, "size": self.announced.get(name, len(content))}
            if sibling["size"] is None:
                del sibling["size"]
            if name.endswith(".safetensors"):
                sha = hashlib.sha256(content).hexdigest()
                sibling["lfs"] = {"sha256": sha, "size": len(content), "pointerSize": 130}
            blob = b"blob %d\0" % len(content) + content
            sibling["blobId"] = hashlib.sha1(blob, usedforsecurity=False).hexdigest()
            siblings.append(sibling)
        siblings += [{"rfilename": f"{number:0100}.json", "size": 0} for number in range(self.num_siblings)]
        return {"id": "org/name", "modelId": "org/name", "sha": self.commit, "siblings": siblings, "revision": revision}


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle(self) -> None:
            with suppress(ConnectionResetError):  # a client was killed
                super().handle()

        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append((path, self.headers["Range"]))
            if hub.is_away:
                self._refuse(503, "")
            elif hub.is_page:
                self._answer(200, b"<html>")
            elif hub.token and self.headers["Authorization"] != f"Bearer {hub.token}":
                self._refuse(401, "RepoNotFound")
            elif found := re.fullmatch(r"/api/models/org/name/revision/(.+)", path):
                if found[1] in {"main", "v2", hub.commit}:
                    self._answer(200, json.dumps(hub.listing(found[1])).encode())
                else:
                    self._refuse(404, "RevisionNotFound")
            elif target := hub.redirects.get(path.rpartition("/")[2]):
                self._answer(302, b"", location=target)
            elif (found := re.fullmatch(rf"/org/name/resolve/{hub.commit}/(.+)", path)) and found[1] in hub.files:
                self._file(hub.files[found[1]])
            else:
                self._refuse(404, "RepoNotFound")

        def _file(self, content: bytes) -> None:
            if hub.damage:
                content = content[:-1] + b"\x00"
            start = 0
            if self.headers["Range"] and hub.knows_ranges:
                start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
            body = content[start:]
            self.send_response(206 if start else 200)
            if "gzip" in (self.headers["Accept-Encoding"] or ""):  # as a proxy on the way may do
                body = gzip.compress(body)
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if hub.cut_after is not None and len(body) > hub.cut_after:
                self.wfile.write(body[: hub.cut_after])
                self.wfile.flush()
                self.connection.close()
                self.close_connection = True
                return
            if hub.stall_after is not None and len(body) > hub.stall_after:
                begin, body = body[: hub.stall_after], body[hub.stall_after :]
                self.wfile.write(begin)
                self.wfile.flush()
                hub.go_on.wait(60)
            with suppress(OSError):  # the client may have been killed
                self.wfile.write(body)

        def _refuse(self, status: int, code: str) -> None:
            self._answer(status, b"{}", code)

        def _answer(self, status: int, body: bytes, code: str = "", location: str = "") -> None:
            self.send_response(status)
            for name, value in (("X-Error-Code", code), ("Location", location)):
                if value:
                    self.send_header(name, value)
            if hub.is_packed:
                body = gzip.compress(body)
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_PAUSE_SECONDS", 0.01)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    fake = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", fake.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield fake
    fake.go_on.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_url: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """A client for a fresh bucket; `name` and `files` say what it holds."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    client = boto3.client("s3")
    name = "b" + hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:20]
    client.create_bucket(Bucket=name)
    for file, content in FILES.items():
        client.put_object(Bucket=name, Key=f"models/llama/{file}", Body=content)
    client.name, client.files = name, FILES
    return client
