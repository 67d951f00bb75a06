"""Which cluster `ballast get`, `explain` and `alerts` read, and what a kubeconfig that cannot be used leads to."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

NOWHERE = "https://127.0.0.1:1"


def make_config(directory: Path, *, cluster: dict[str, Any] | None = None, user: Any = None, **more: Any) -> Path:
    file = directory / "kubeconfig.yaml"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "k", "cluster": {"server": NOWHERE} | (cluster or {})}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "users": [{"name": "u", "user": user if user is not None else {"token": "x"}}],
    }
    file.write_text(yaml.safe_dump(config | more))
    return file


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """An HTTP server that lists nothing. Yield its address, and the targets of the requests with their credentials."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            asked.extend(filter(None, [self.headers["Proxy-Authorization"], self.headers["Authorization"]]))
            body = json.dumps({"items": []}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", asked
        running.shutdown()
        thread.join()


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: tuple[str, list[str]]) -> None:
    """The files and variables of a pod, and an empty home directory."""
    account = tmp_path / "account"
    account.mkdir()
    for name in ("namespace", "token", "ca.crt"):
        (account / name).write_text("x")
    monkeypatch.setattr("ballast_cli.cluster.POD_NAMESPACE", account / "namespace")
    monkeypatch.setattr("kubernetes.config.incluster_config.SERVICE_TOKEN_FILENAME", str(account / "token"))
    monkeypatch.setattr("kubernetes.config.incluster_config.SERVICE_CERT_FILENAME", str(account / "ca.crt"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)


@pytest.mark.parametrize(
    "text",
    ["", "a: [b", "just text", "[1, 2]", "\x00", "clusters: null\ncontexts: null\nusers: null\ncurrent-context: c\n"],
)
def test_a_malformed_kubeconfig_is_named(ballast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str):
    file = tmp_path / "kubeconfig.yaml"
    file.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(file))
    ran = ballast("get")

    assert ran.code == 4
    assert f"Cannot use the kubeconfig {file}: " in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cluster": {"certificate-authority-data": "!!!notbase64"}}, "Cannot use the kubeconfig"),
        ({"cluster": {"certificate-authority": "/nowhere/ca.crt"}}, "/nowhere/ca.crt"),
        ({"cluster": {"proxy-url": "socks5://user:hunter2@127.0.0.1:1"}}, "proxy-url: found socks5://, expected"),
        ({"cluster": {"proxy-url": "user:hunter2@127.0.0.1:1"}}, "proxy-url: found no scheme, expected"),
        ({"cluster": {"proxy-url": "http://user:hunter2@host:port"}}, "proxy-url is no URL"),
        ({"user": {"tokenFile": "/nowhere/token"}}, "/nowhere/token: No such file or directory"),
        ({"users": []}, "with name u"),
        ({"user": {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "no-such-plugin"}}}, "user u"),
        ({"user": {"auth-provider": {"name": "azure", "config": {}}}}, "user u"),
        ({"users": [{"name": "u", "token": "hunter2"}]}, "Expected key user in"),
        (
            {"users": [{"name": "u", "user": {"auth-provider": {"name": "oidc", "config": {"x": "{hunter2}/"}}}}]},
            "id-token",
        ),
        ({"contexts": [{"name": "c", "context": {"cluster": "k", "user": {"token": "hunter2"}}}]}, "Expected object"),
        ({"user": {"token": "hunter2\nhunter2"}}, "the token has a line break"),
        ({"user": {"token": "hunter2€"}}, "the token has a line break or another character"),
        ({"cluster": {"server": "https://me:hunter2@host:port"}}, "URL is malformed: https://host:port."),
        ({"cluster": {"server": "https://me:hunter2/@host"}}, "URL is malformed: https://host."),
    ],
)
def test_a_kubeconfig_that_yields_no_connection_or_no_credentials_is_refused(
    ballast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str
):
    monkeypatch.setenv("KUBECONFIG", str(make_config(tmp_path, **changes)))
    ran = ballast("get")

    assert ran.code == 4
    assert said in ran.err
    assert "does not answer" not in ran.err
    assert "hunter2" not in ran.err


@pytest.mark.parametrize("inline", [False, True])
def test_blanks_around_a_token_are_no_part_of_it(
    ballast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: tuple[str, list[str]], *, inline: bool
):
    (tmp_path / "token").write_text(" s3cr3t-token\n")
    user = {"token": "s3cr3t-token\r\n"} if inline else {"tokenFile": "token"}
    monkeypatch.setenv("KUBECONFIG", str(make_config(tmp_path, cluster={"server": server[0]}, user=user)))
    ran = ballast("get", "-A")

    assert ran.code == 0, ran.err
    assert server[1][1:] == ["Bearer s3cr3t-token"]


def test_a_user_without_credentials_is_anonymous(
    ballast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: tuple[str, list[str]]
):
    users = [{"name": "u", "user": None}]
    monkeypatch.setenv("KUBECONFIG", str(make_config(tmp_path, cluster={"server": server[0]}, users=users)))
    ran = ballast("get", "-A")

    assert ran.code == 0, ran.err
    assert len(server[1]) == 1  # no credentials


def test_the_password_in_the_url_of_the_server_is_not_printed(ballast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cluster = {"server": NOWHERE.replace("//", "//me:hunter2@")}
    monkeypatch.setenv("KUBECONFIG", str(make_config(tmp_path, cluster=cluster)))
    ran = ballast("get")

    assert f"The API server at {NOWHERE} does not answer" in ran.err
    assert "hunter2" not in ran.err


def test_what_a_plugin_said_is_in_the_sentence_and_not_in_a_log(
    ballast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    plugin = {"apiVersion": "v1", "command": "sh", "args": ["-c", "echo Log in first. >&2; exit 1"]}
    monkeypatch.setenv("KUBECONFIG", str(make_config(tmp_path, user={"exec": plugin})))
    ran = ballast("get")

    assert "user u yields no credentials: exec: process returned 1. Log in first. Set KUBECONFIG" in ran.err
    assert ran.err.count("\n") == 1
    assert not caplog.records


def test_the_proxy_of_the_cluster_is_used(
    ballast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: tuple[str, list[str]]
):
    address, asked = server
    cluster = {"server": "http://cluster.invalid", "proxy-url": address.replace("//", "//me:a%40%E2%82%AC@")}
    monkeypatch.setenv("KUBECONFIG", str(make_config(tmp_path, cluster=cluster)))
    monkeypatch.setenv("NO_PROXY", "cluster.invalid")  # as with kubectl, only for the proxy of the environment
    ran = ballast("get", "-A")

    assert ran.code == 0, ran.err
    credentials = base64.b64encode("me:a@€".encode()).decode()
    found = [target.partition("/apis/")[0] for target in asked]
    assert found == ["http://cluster.invalid", f"Basic {credentials}", "Bearer x"]


def test_another_context_is_read_by_name(
    ballast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: tuple[str, list[str]]
):
    clusters = [{"name": "k", "cluster": {"server": NOWHERE}}, {"name": "other", "cluster": {"server": server[0]}}]
    contexts = [
        {"name": "c", "context": {"cluster": "k", "user": "u"}},
        {"name": "d", "context": {"cluster": "other", "user": "u", "namespace": "team"}},
    ]
    monkeypatch.setenv("KUBECONFIG", str(make_config(tmp_path, clusters=clusters, contexts=contexts)))
    other, missing = ballast("get", "--context", "d"), ballast("explain", "chat", "--context", "e")
    of_a_file = ballast("alerts", "-f", "chat.yaml", "--context", "d")

    assert (other.code, missing.code, of_a_file.code) == (0, 4, 2)
    assert "--context names a cluster" in of_a_file.err
    assert [target.partition("/namespaces/")[2] for target in server[1][::2]] == ["team/inferencedeployments"]
    assert "Expected object with name e" in missing.err


@pytest.mark.usefixtures("pod")
def test_a_pod_reads_its_own_cluster_only_without_a_kubeconfig(
    ballast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(_: int) -> None:
        raise KeyError

    own = ballast("get")
    with monkeypatch.context() as patched:  # a user that the image does not know
        patched.delenv("HOME")
        patched.setattr("pwd.getpwuid", fail)
        homeless = ballast("get")
    (tmp_path / "account" / "token").write_text("hunter2\nhunter2\n")
    two_lines = ballast("get")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing.yaml"))
    named = ballast("get")
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    nowhere = ballast("get")

    assert "The API server at https://127.0.0.1:1 does not answer" in own.err
    assert homeless.err == own.err
    assert (named.code, nowhere.code) == (4, 4)
    assert f"Cannot use the kubeconfig {tmp_path / 'missing.yaml'}" in named.err
    assert "Cannot use the service account of this pod" in nowhere.err
    assert "Cannot use the service account of this pod: the token has a line break" in two_lines.err


@pytest.mark.parametrize("name", ["", "a/b", "..", "a?b", "A", "job-1@team/a"])
def test_a_name_that_no_resource_can_have_is_not_asked_for(
    ballast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: tuple[str, list[str]], name: str
):
    monkeypatch.setenv("KUBECONFIG", str(make_config(tmp_path, cluster={"server": server[0]})))
    explained, alerts = ballast("explain", name), ballast("alerts", name)
    in_namespace = ballast("get", "-n", name)

    assert (explained.code, alerts.code, in_namespace.code) == (3, 3, 2)
    assert f"{name!r}" in explained.err
    assert server[1] == []
