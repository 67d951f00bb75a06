"""`ballast get` and `ballast explain` against a real API server."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import redis
import yaml
from control_plane import ControlPlane
from typer.testing import CliRunner

from ballast_api.conditions import ConditionType
from ballast_api.names import API_VERSION, KIND, PLURAL
from ballast_cli.app import app
from ballast_cli.errors import NotFound
from ballast_queue.redis_store import Queue
from ballast_queue.rights import worker_rules

pytestmark = pytest.mark.envtest
LONG_AGO = "2026-01-01T00:00:00Z"


@pytest.fixture(autouse=True)
def kubeconfig(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a person has."""
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig))


def make(plane: ControlPlane, namespace: str, status: dict[str, Any] | None = None) -> None:
    path = f"/apis/{API_VERSION}/namespaces/{namespace}/{PLURAL}"
    body = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "chat"},
        "spec": {"model": {"uri": "hf://a/b"}},
    }
    plane.http.post(path, json=body).raise_for_status()
    if status:
        headers = {"Content-Type": "application/merge-patch+json"}
        plane.http.patch(f"{path}/chat/status", json={"status": status}, headers=headers).raise_for_status()


def condition(kind: ConditionType, status: str, reason: str, message: str) -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": LONG_AGO}


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)

    assert done.exit_code == 0, done.exception
    return done.stdout


def test_resources_are_listed_with_their_slots(plane: ControlPlane, namespace: str) -> None:
    ready = condition(ConditionType.READY, "True", "Serving", "1 of 1 workers are ready")
    make(plane, namespace, {"conditions": [ready], "readyReplicas": 1, "slots": {"online": 14, "offline": 2}})

    listed = run("get", "-n", namespace)

    assert re.search(rf"{namespace} +chat +True +Serving +1/1 +14 +2 +hf://a/b", listed)
    assert json.loads(run("get", "-A", "--json"))["version"] == 1


def test_a_resource_that_is_nested_deep_hides_no_other(plane: ControlPlane, namespace: str) -> None:
    make(plane, namespace)
    deep = "[" * 9900 + "]" * 9900
    about = f'"apiVersion":"{API_VERSION}","kind":"{KIND}","metadata":{{"name":"deep"}}'
    text = f'{{{about},"spec":{{"model":{{"uri":"hf://c/d"}},"template":{{"affinity":{{"x":{deep}}}}}}}}}'
    path, headers = f"/apis/{API_VERSION}/namespaces/{namespace}/{PLURAL}", {"Content-Type": "application/json"}
    plane.http.post(path, content=text, headers=headers).raise_for_status()

    for arguments in (("get", "-A"), ("get", "-n", namespace)):
        assert {"hf://a/b", "hf://c/d"} <= set(run(*arguments).split())
    assert json.loads(run("get", "-A", "--json"))["resources"]
    assert "The operator has not observed generation 1" in run("explain", "deep", "-n", namespace)


def test_an_empty_namespace_is_reported(namespace: str) -> None:
    done = CliRunner().invoke(app, ["get", "-n", namespace])

    assert (done.exit_code, done.stdout) == (0, "")
    assert "No InferenceDeployments found" in done.stderr


def test_problems_come_first_with_the_operators_messages(plane: ControlPlane, namespace: str) -> None:
    make(
        plane,
        namespace,
        {
            "observedGeneration": 1,
            "conditions": [
                condition(ConditionType.SLO_MET, "True", "Met", "TTFT p99 200 ms of 1000"),
                condition(ConditionType.DEGRADED, "True", "Unschedulable", "0/3 nodes have a free nvidia.com/gpu"),
            ],
            "scaling": {"replicas": 3, "because": "40 online requests, 16 fit one replica"},
        },
    )
    event = {
        "metadata": {"name": "e1"},
        "involvedObject": {"apiVersion": API_VERSION, "kind": KIND, "name": "chat", "namespace": namespace},
        "reason": "Applied", "message": "Created\tDeployment chat\n! Forged: True\u2028! Forged",
        "type": "Normal", "lastTimestamp": LONG_AGO,
    }  # fmt: skip
    plane.http.post(f"/api/v1/namespaces/{namespace}/events", json=event).raise_for_status()

    said = run("explain", "chat", "-n", namespace)

    assert said.index("! Degraded: True (Unschedulable)") < said.index("0/3 nodes") < said.index("  SLOMet: True (Met)")
    assert "Scaling: 3 replicas: 40 online requests" in said
    assert "Applied: Created Deployment chat\n        ! Forged: True?! Forged\n" in said


def test_a_resource_that_the_operator_has_not_observed_is_reported(plane: ControlPlane, namespace: str) -> None:
    make(plane, namespace)

    assert "The operator has not observed generation 1 yet (last: none)" in run("explain", "chat", "-n", namespace)


def test_a_name_that_is_not_there_is_an_exit_code_of_its_own(namespace: str) -> None:
    done = CliRunner().invoke(app, ["explain", "nobody", "-n", namespace])

    assert isinstance(done.exception, NotFound)
    assert "`ballast get -A` lists" in str(done.exception)


def test_the_alerts_of_a_resource_are_a_rules_file(plane: ControlPlane, namespace: str) -> None:
    make(plane, namespace)
    groups = yaml.safe_load(run("alerts", "chat", "-n", namespace))["groups"]

    assert {group["name"].rpartition("/")[0] for group in groups} == {f"ballast/{namespace}/chat"}
    assert "BallastTtftBudgetBurn" in {rule.get("alert") for group in groups for rule in group["rules"]}


def test_the_jobs_of_a_resource_are_explained_where_its_redis_is_named(
    plane: ControlPlane, namespace: str, valkey: Any
) -> None:
    make(plane, namespace)
    queue = Queue.connect(valkey.url, f"{namespace}/chat")
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}
    job_id = queue.submissions.submit([json.dumps(line)]).job_id
    queue.jobs.pause(job_id)
    queue.close()
    said = run("explain", "chat", "-n", namespace, "--redis-url", valkey.url)

    assert f"  {job_id}: paused, tenant default, priority 0; 0 of 1 items done" in said
    assert f"`ballast resume {job_id} --redis-url {valkey.url} --queue {namespace}/chat`" in said
    assert job_id not in run("explain", "chat", "-n", namespace)
    with redis.Redis.from_url(valkey.url) as admin:
        # A user of this queue may not look for a job `chat` in the default one.
        admin.execute_command("ACL", "SETUSER", namespace, "reset", "on", ">x", *worker_rules(f"{namespace}/chat"))
        one = valkey.url.replace("redis://", f"redis://{namespace}:x@")
        assert job_id in run("explain", "chat", "-n", namespace, "--redis-url", one)
        admin.execute_command("ACL", "DELUSER", namespace)
    away = CliRunner().invoke(app, ["explain", "chat", "-n", namespace, "--redis-url", "redis://127.0.0.1:9"])
    assert "has not observed generation 1" in away.stdout
    assert "cannot explain the jobs" in away.stderr
