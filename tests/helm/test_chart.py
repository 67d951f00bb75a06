"""The objects that the chart renders, and its notes."""

from __future__ import annotations

import difflib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from chart import CASES, CHART, WITH_PODS, merged, pod_of

from ballast_api import crd
from ballast_api.inference_deployment import InferenceDeployment

if TYPE_CHECKING:
    from conftest import Helm

pytestmark = pytest.mark.helm

SNAPSHOTS = Path(__file__).parent / "snapshots"
BASES = {"monitored": "defaults", "without-redis": "external-redis"}
"""The snapshot of a case here has only its differences from the other case."""


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


def test_the_chart_contains_the_generated_definition_and_keeps_it(helm: Helm) -> None:
    name = f"CustomResourceDefinition/{crd.CRD_NAME}"
    rendered = helm.objects({})[name]
    unkept = helm.objects({"crds": {"keep": False}})[name]

    assert rendered["spec"] == crd.manifest()["spec"]
    assert rendered["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert "annotations" not in unkept["metadata"]
    assert name not in helm.objects({"crds": {"enabled": False}})


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


def labels_of_pod(rendered: dict[str, Any]) -> dict[str, str]:
    return (rendered if rendered["kind"] == "Pod" else rendered["spec"]["template"])["metadata"]["labels"]


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
    resources = {"requests": {"cpu": "1", "memory": "3Gi"}, "limits": {"cpu": "1", "memory": "3Gi"}}
    objects = helm.objects({"operator": {"resources": resources}, "valkey": {"resources": resources}})
    pods = [pod_of(each) for each in objects.values() if each["kind"] in {"Deployment", "StatefulSet", "Pod"}]
    found = {each["name"]: each.get("resources") for pod in pods for each in pod["containers"]}

    assert found == dict.fromkeys(("operator", "valkey", "test"), resources)


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
