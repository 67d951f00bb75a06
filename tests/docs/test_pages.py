"""Checks that the pages name files, commands, options, metrics, and fields that exist, and what a step needs."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from control_plane import ControlPlane, assets
from documented_scaling import hand_over
from pydantic.alias_generators import to_camel

from ballast_api.inference_deployment import InferenceDeployment, Spec
from ballast_api.names import redis_secret
from ballast_api.pods import PodTemplate
from ballast_api.worker_config import WorkerConfig
from ballast_cli.app import app
from ballast_operator.children.files import sources
from ballast_operator.children.service import service
from ballast_operator.named_secrets import named_secrets
from ballast_operator.permitted import PodRules
from ballast_policy.request import RequestClass
from ballast_worker.tenancy import Tenancy

ROOT = Path(__file__).parents[2]
HOW_TO = ROOT / "docs" / "how-to"
SAMPLES = sorted((ROOT / "docs" / "samples").glob("*.yaml"))
VERBS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "e2e/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
CHART = (ROOT / "docs" / "reference" / "chart.md").read_text()
METRICS = "\n".join((ROOT / "docs" / "reference" / name).read_text() for name in ("metrics.md", "operator.md"))
SUFFIXES = ("_bucket", "_sum", "_count")
PACKAGES = {path.parent.name for path in ROOT.glob("*/ballast_*/__init__.py")}
SECTIONS = ("model", "engine", "gpu", "slo", "offline", "limits", "cost", "scaling", "rollout", "disruption", "redis")
FIELD = re.compile(rf"`(?:spec\.)?((?:{'|'.join((*SECTIONS, 'monitoring', 'template', 'runtime'))})\.[\w.\[\]]+)`")


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def unknown_metrics(text: str) -> set[str]:
    named = set(re.findall(r"\b(ballast_[a-z_]+|vllm:[a-z_]+)\b", text)) - PACKAGES
    named -= {name for name in named if re.search(rf"{name}[./]", text)}  # a module or a folder
    return {name for name in named if f"`{base(name)}`" not in METRICS}


def base(metric: str) -> str:
    return next((metric.removesuffix(suffix) for suffix in SUFFIXES if metric.endswith(suffix)), metric)


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each `ballast` command of the code of a page: its subcommand, and its long options."""
    code = "\n".join(re.findall(r"```(?:sh)?\n(.*?)```", text, re.DOTALL) + re.findall(r"`(ballast [^`]+)`", text))
    code += "\n" + "\n".join(re.findall(r"^    (ballast .*)$", text, re.MULTILINE))
    for line in code.replace("\\\n", " ").splitlines():
        for name, rest in re.findall(r"(?:^|[;|($] *)ballast ([a-z]+)([^|;$)#>]*)", line.strip()):
            yield name, re.findall(r"--[a-z][a-z-]*", rest)


def unknown_commands(text: str) -> list[str]:
    known = {
        name: {option for parameter in each.params for option in (*parameter.opts, *parameter.secondary_opts)}
        | {"--help"}
        | {
            option
            for inner in getattr(each, "commands", {}).values()
            for parameter in inner.params
            for option in parameter.opts
        }
        for name, each in VERBS.items()
    }
    return [
        f"{name} {' '.join(options)}"
        for name, options in commands(text)
        if name not in known or not set(options) <= known[name]
    ]


def unknown_fields(text: str) -> list[str]:
    unknown = [path for path in FIELD.findall(text) if not any(has(model, path) for model in roots())]
    return [path for path in unknown if f"`{path}`" not in CHART]


def roots() -> tuple[dict, ...]:
    return tuple(
        schema | schema.get("$defs", {}).get(inner, {}) | {"$defs": schema["$defs"]}
        for schema, inner in ((InferenceDeployment.model_json_schema(), "Spec"), (WorkerConfig.model_json_schema(), ""))
    )


def has(schema: dict, path: str) -> bool:
    found = schema
    for name in re.sub(r"\[\]", "", path).split("."):
        properties = found.get("properties")
        if properties is None:
            return found is not schema  # a free mapping: the API server's own fields follow
        if name not in properties:
            return False
        found = resolved(properties[name], schema["$defs"])
    return True


def resolved(schema: dict, definitions: dict) -> dict:
    if "$ref" in schema:
        return resolved(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions)
    for option in schema.get("anyOf", []):
        if option.get("type") != "null":
            return resolved(option, definitions)
    return resolved(schema["items"], definitions) if "items" in schema else schema


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_only_what_exists(page: Path):
    text = page.read_text()

    assert not broken_links(page, text)
    assert not unknown_metrics(text)
    assert not unknown_commands(text)
    assert not unknown_fields(text)


def test_a_wrong_name_would_be_found():
    page = ROOT / "README.md"

    assert broken_links(page, "[a](docs/none.md) [b](docs/conditions.md#none)") == [
        "docs/none.md",
        "docs/conditions.md#none",
    ]
    assert unknown_metrics("`ballast_none_total` and `ballast_redis_up`") == {"ballast_none_total"}
    assert unknown_commands("`ballast none` `ballast top --once --none`") == ["none ", "top --once --none"]
    assert unknown_fields("`offline.none` `spec.slo.ttftMilliseconds` `runtime.port`") == ["offline.none"]


def test_a_runbook_with_a_command_for_a_queue_links_to_how_to_connect():
    of_queues = {name for name, verb in VERBS.items() if any("--queue" in parameter.opts for parameter in verb.params)}
    pages = {page.name: page.read_text() for page in PAGES if page.parent.name == "runbooks"}
    named = {name: {verb for verb, _ in commands(text)} & of_queues - {"explain"} for name, text in pages.items()}

    assert named["dead-letters.md"]
    assert not [
        name for name, verbs in named.items() if verbs and "#connect-to-the-queue-of-a-resource)" not in pages[name]
    ]


def test_a_runbook_reads_the_resource_of_the_alert_and_no_other():
    runbooks = [page.read_text() for page in PAGES if page.parent.name == "runbooks"]
    spans = [" ".join(span.split()) for text in runbooks for span in re.findall(r"`([^`]+)`", text)]
    of_objects = re.compile(r"(kubectl (get|describe|logs|delete) (?!node)\w|ballast explain NAME)")
    called = [span for span in spans if of_objects.match(span)]
    evaluated = [span for span in spans if re.match(r"\w+ by |\w+\(", span) and "ballast_" in span]

    assert called
    assert evaluated
    assert not [span for span in called if " -n " not in span]
    assert not [span for span in evaluated if 'namespace="NAMESPACE",service="NAME"' not in span]


def test_the_threat_model_names_each_field_that_reaches_beyond_a_worker():
    """A new field of the resource goes into SECURITY.md, or here if it only describes how a worker computes."""
    harmless = {
        "cost",
        "image_pull_policy",
        "limits",
        "resources",
        "rollout",
        "shared_memory_mebibytes",
        "slo",
        "slots",
    }
    text = (ROOT / "SECURITY.md").read_text().partition("an account that may create")[2].partition("\n## ")[0]
    fields = Spec.model_fields.keys() | PodTemplate.model_fields.keys()

    words = {word for span in re.findall(r"`([^`]+)`", text) for word in re.findall(r"\w+", span)}

    assert {name for name in fields if to_camel(name) not in words} <= harmless


def test_the_explanation_of_the_policy_is_one_page_with_one_picture():
    text = (ROOT / "docs" / "explanation" / "how-slots-are-shared.md").read_text()

    assert len(text.split()) < 700, "shorten another sentence of the page, or move details to the page of details"
    assert text.count("![") == 1


def test_the_design_document_has_each_package_in_its_table_and_its_picture():
    page = ROOT / "docs" / "design" / "architecture.md"
    picture = page.parent.parent / "images" / "architecture.svg"

    assert {name for name in PACKAGES if f"| `{name}` |" not in page.read_text()} == set()
    assert {name for name in PACKAGES if f">{name}" not in picture.read_text()} == set()


def test_every_page_can_be_reached_from_the_readme():
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            target = (page.parent / link).resolve()
            todo += sorted(target.glob("*.md")) if target.is_dir() else [target] if target.exists() else []

    assert not {str(page.relative_to(ROOT)) for page in PAGES} - {str(page.relative_to(ROOT)) for page in reached}


def test_a_page_that_names_a_redis_states_who_loads_the_functions():
    names = re.compile(r"redisUrl|RUNTIME_REDIS_URL|`spec\.redis`")
    loads = re.compile("ballast queue init|#load-the-functions-once")
    texts = {page.name: page.read_text() for page in HOW_TO.glob("*.md")}

    assert [name for name, text in texts.items() if names.search(text) and not loads.search(text)] == []


def needs(resource: InferenceDeployment) -> Iterator[str]:
    """Yield what a resource needs that no cluster has by default."""
    secrets, spec, template = named_secrets(resource), resource.spec, resource.spec.template
    yield from (*secrets, "ballast.dev/allow=true") if secrets else ()
    yield from re.findall(r"\((allowed\w+)\)", " ".join(PodRules().violations(resource)))
    yield from (source.claim for source in sources(resource) if source.claim is not None)
    yield from ("redisHosts", "functions of Ballast") if spec.redis is not None else ()
    if template.priority_class_name is not None:
        yield f"PriorityClass {template.priority_class_name}"
    if template.runtime_class_name is not None:
        yield f"RuntimeClass {template.runtime_class_name}"


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_the_first_lines_of_a_sample_state_what_it_needs(path: Path):
    header = re.match(r"(#.*\n)*", path.read_text())[0]
    words = " ".join(header.replace("#", " ").split())
    (manifest,) = (
        each for each in yaml.safe_load_all(path.read_text()) if each["kind"] == InferenceDeployment.__name__
    )

    assert [each for each in needs(InferenceDeployment.read(manifest, path.name)) if each not in words] == []


ALL_SECRETS: tuple[dict[str, Any], ...] = (
    {
        "model": {"uri": "hf://a/b", "credentialsSecret": "s-model"},
        "redis": {"secretName": "s-redis"},
        "apiKeys": {"secretName": "s-keys"},
        "runtime": {"ray": {"gcsRedis": {"address": "ray:6379", "passwordSecret": "s-ray"}}},
        "template": {
            "imagePullSecrets": ["s-pull", "s-pull-too"],
            "env": [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "s-variable", "key": "k"}}}],
            "volumes": [
                {"name": "a", "secret": {"secretName": "s-volume"}},
                {
                    "name": "b",
                    "projected": {"sources": [{"secret": {"name": "s-part", "items": [{"key": "k", "path": "p"}]}}]},
                },
                {"name": "c", "csi": {"driver": "d", "nodePublishSecretRef": {"name": "s-csi"}}},
                {"name": "d", "cephfs": {"monitors": ["m"], "secretRef": {"name": "s-ceph"}}},
            ],
        },
    },
    {
        "model": {"uri": "file:///m"},
        "network": {"tlsSecret": "s-tls"},
        "queueAccess": {"submitters": [{"secretName": "ci-ballast-submitter"}]},
    },
)


@pytest.mark.envtest
def test_the_command_before_an_upgrade_lists_every_secret(plane: ControlPlane, namespace: str):
    resources = [
        {"apiVersion": "ballast.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": f"r{i}"}, "spec": s}
        for i, s in enumerate(ALL_SECRETS)
    ]
    plane.kubectl(
        "apply", "-n", namespace, "-f", "-", manifest={"apiVersion": "v1", "kind": "List", "items": resources}
    )
    command = re.search(r"kubectl get infd -A (.*?)\n *```", (HOW_TO / "secrets.md").read_text(), re.DOTALL)[1]
    kubectl = f"{assets() / 'kubectl'} --kubeconfig {plane.kubeconfig} get infd -n {namespace}"
    done = subprocess.run(["bash", "-c", f"{kubectl} {command}"], capture_output=True, text=True, check=True)

    expected = [{f"{namespace}:", *named_secrets(InferenceDeployment.read(each, "test"))} for each in resources]
    assert [set(line.split()) for line in done.stdout.splitlines() if line.strip()] == expected


@pytest.mark.envtest
@pytest.mark.parametrize(("words", "flags"), [("edit-last-applied", ()), ("--server-side", ("--server-side",))])
def test_the_number_of_workers_stays_if_the_line_is_removed_after_it_is_handed_over(
    words: str, flags: tuple[str, ...], plane: ControlPlane, namespace: str
):
    def apply(**spec: Any) -> int:
        spec = {"model": {"uri": "file:///m"}, **spec}
        body = {"apiVersion": "ballast.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": "chat"}}
        plane.kubectl("apply", "-n", namespace, *flags, "-f", "-", manifest=body | {"spec": spec})
        shown = plane.kubectl("get", "-n", namespace, "infd", "chat", "-o", "jsonpath={.spec.replicas}").stdout
        return int(shown)

    kubectl = f"{assets() / 'kubectl'} --kubeconfig {plane.kubeconfig} -n {namespace}"
    command = re.sub(r"\bkubectl\b", kubectl, hand_over(words))
    editor = os.environ | {"KUBE_EDITOR": "sed -i /replicas:/d"}
    before, without = apply(replicas=3), apply()
    apply(replicas=3)
    subprocess.run(["bash", "-c", command], check=True, env=editor)

    assert (before, without, apply(slots=4)) == (3, 1, 3)


@pytest.mark.envtest
def test_the_api_server_accepts_the_policies_of_the_pages(plane: ControlPlane, namespace: str):
    pages = [(HOW_TO / name).read_text() for name in ("network-policies.md", "service-mesh.md")]
    blocks = [re.findall(r"<!-- policy: \w+ -->\n```yaml\n(.*?)```", page, re.DOTALL) for page in pages]
    policies = [yaml.safe_load(text) for texts in blocks for text in texts]

    for policy in policies:
        plane.kubectl("create", "--validate=strict", "-n", namespace, "-f", "-", manifest=policy)

    assert [len(texts) for texts in blocks] == [4, 2]
    assert len({policy["metadata"]["name"] for policy in policies}) == len(policies), (
        "policies of one name replace another"
    )


@pytest.mark.envtest
def test_the_api_server_finds_no_difference_in_a_resource_with_defaults_in_lists(plane: ControlPlane, namespace: str):
    spec = {
        "model": {"uri": "file:///m"},
        "offline": {"tenants": [{"name": "blue"}]},
        "template": {"tolerations": [{"key": "gpu", "value": "a"}]},
    }
    body = {"apiVersion": "ballast.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": "chat"}}
    there = ("-n", namespace, "-f", "-")
    plane.kubectl("apply", *there, manifest=body | {"spec": spec})

    argo_cd = ("--server-side", "--force-conflicts", "--field-manager=argocd-controller")
    difference = plane.kubectl("diff", *argo_cd, *there, manifest=body | {"spec": spec}, check=False)

    assert (difference.returncode, difference.stdout) == (0, ""), difference.stderr


def documented(page: str, name: str) -> Any:
    """Return the manifest of a page that a comment names."""
    return yaml.safe_load(re.search(rf"<!-- manifest: {name} -->\n```yaml\n(.*?)```", page, re.DOTALL)[1])


@pytest.mark.envtest
def test_the_steps_of_a_move_select_the_workers_and_the_old_pods_again(plane: ControlPlane, namespace: str):
    page = (HOW_TO / "move-to-ballast.md").read_text()
    manifest, route = documented(page, "resource"), documented(page, "route")
    workers = service(InferenceDeployment.read(manifest, "page"))
    ported = [{"name": "http", "port": 80, "targetPort": 8000}]
    old = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "llama"}}
    for each in (manifest, old | {"spec": {"selector": {"app": "llama"}, "ports": ported}}):
        plane.kubectl("create", "--validate=strict", "-n", namespace, "-f", "-", manifest=each)
    kubectl = f"{assets() / 'kubectl'} --kubeconfig {plane.kubeconfig} -n {namespace}"

    def after(command: str) -> tuple[dict[str, str], int | str]:
        subprocess.run(["bash", "-c", command.replace("kubectl", kubectl, 1)], check=True, capture_output=True)
        spec = json.loads(plane.kubectl("get", "-n", namespace, "service", "llama", "-o", "json").stdout)["spec"]
        return spec["selector"], spec["ports"][0]["targetPort"]

    there, back = (
        after(each) for each in re.findall(r"^kubectl patch service .*?\]'$", page, re.DOTALL | re.MULTILINE)
    )
    (port,) = workers["spec"]["ports"]
    assert (there, back) == ((workers["spec"]["selector"], port["targetPort"]), ({"app": "llama"}, 8000))
    assert [(each["name"], each["port"]) for each in route["spec"]["rules"][0]["backendRefs"]] == [
        ("llama", 80),
        (workers["metadata"]["name"], port["port"]),
    ]


@pytest.mark.envtest
def test_the_nightly_job_uses_the_secret_of_the_workers(plane: ControlPlane, namespace: str):
    manifest = documented((HOW_TO / "submit-a-batch-file.md").read_text(), "nightly")
    plane.kubectl("create", "--validate=strict", "-n", namespace, "-f", "-", manifest=manifest)
    pod = manifest["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]

    secrets = [each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each]
    secrets += [each["valueFrom"]["secretKeyRef"]["name"] for each in container["env"] if "secretKeyRef" in str(each)]
    script = f"```sh\n{container['args'][0]}```"
    assert set(secrets) == {redis_secret("chat")}
    assert [name for name, _ in commands(script)] == ["submit", "results"]
    assert not unknown_commands(script)


def test_the_route_of_a_batch_gateway_makes_its_requests_offline():
    (rule,) = documented((HOW_TO / "configure-a-worker.md").read_text(), "batch-route")["spec"]["rules"]
    (changed,) = rule["filters"]
    sent = [header for match in rule["matches"] for header in match["headers"]]
    sent.append({"name": "x-dynamo-request-priority", "value": "7"})

    def read(headers: list[dict[str, str]]) -> tuple[RequestClass, int]:
        caller = Tenancy((), None).caller({each["name"].encode(): each["value"].encode() for each in headers})
        return caller.request_class, caller.priority

    assert read(sent) == (RequestClass.ONLINE, 0)
    assert read([*sent, *changed["requestHeaderModifier"]["set"]]) == (RequestClass.OFFLINE, 0)
