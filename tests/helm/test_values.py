"""Each value of the chart has an effect and a description, and a wrong one is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from chart import CHART, SCHEMA, VALUES, merged, nested, pod_of
from pydantic.alias_generators import to_camel, to_snake

from ballast_operator.context import VALKEY_SECURITY
from ballast_operator.settings import PREFIX, OperatorSettings

if TYPE_CHECKING:
    from conftest import Helm

pytestmark = pytest.mark.helm

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


@pytest.mark.parametrize("value", ["commonLabels", "operator.podLabels", "valkey.podLabels"])
@pytest.mark.parametrize("label", ["name", "instance", "component"])
def test_a_label_by_which_the_chart_selects_its_pods_is_refused(helm: Helm, value: str, label: str) -> None:
    done = helm.template(nested(value, {f"app.kubernetes.io/{label}": "other"}), check=False)

    assert done.returncode != 0
    assert f"{value} sets the label app.kubernetes.io/{label}, by which the chart selects its pods" in done.stderr


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


UNCHECKED = {"default", "description", "title"}


def test_each_setting_has_the_type_and_the_bounds_of_the_operator() -> None:
    fields = OperatorSettings.model_json_schema()["properties"]
    expected = {
        name: [{key: bound for key, bound in fields[to_snake(name)].items() if key not in UNCHECKED}]
        for name in SETTING_NAMES
    }

    assert {name: schemas_of(name) for name in SETTING_NAMES} == expected


def test_each_setting_reaches_the_operator_under_its_name(helm: Helm) -> None:
    values = {name: {"string": "7", "boolean": False}.get(schemas_of(name)[0]["type"], 7) for name in SETTING_NAMES}
    objects = helm.objects({"operator": {"settings": values}})
    (container,) = pod_of(objects["Deployment/ballast-operator"])["containers"]
    given = {each["name"] for each in container["env"] if each.get("value") in {"7", "false"}}

    assert given == {PREFIX + to_snake(name).upper() for name in SETTING_NAMES}


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
