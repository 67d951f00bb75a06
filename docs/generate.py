"""Write CRDs and reference documentation from the code, or check that they are what the code says.

python docs/generate.py            write
python docs/generate.py --check    fail, and name the files, where one differs
python docs/generate.py crds       write those whose path contains `crds`
"""

from __future__ import annotations

import argparse
import html
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dashboard
import yaml
from prometheus_client.core import Metric

from ballast_api import crd
from ballast_api.base import LATER, VALIDATIONS
from ballast_api.inference_deployment import Spec
from ballast_api.status import Status
from ballast_api.worker_config import WorkerConfig
from ballast_engine.footprint import Footprint
from ballast_engine.stats import ClassStats, EngineStats
from ballast_operator import permissions
from ballast_operator.metrics import Metrics as OperatorMetrics
from ballast_operator.settings import PREFIX, OperatorSettings
from ballast_policy.learning.cost import CostModel
from ballast_policy.request import RequestClass
from ballast_policy.reservation import Reservation
from ballast_queue.job import RequestCounts
from ballast_queue.status import QueueStats
from ballast_worker.metrics import QueueView, ScrapeData, Spending, StepMetrics, WorkerMetrics
from ballast_worker.requests import Recorder
from ballast_worker.utilization import Utilization

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"
CHART = ROOT / "helm" / "ballast"
NOTE = "<!-- Written by `make generate`; edit the code it describes. -->\n\n"


def kind_of(schema: dict[str, Any]) -> str:
    """A field's type in words, with its bounds."""
    if "anyOf" in schema:
        return " or ".join(kind_of(option) for option in schema["anyOf"] if option.get("type") != "null")
    if "enum" in schema:
        return " \\| ".join(f"`{value}`" for value in schema["enum"])
    if "$ref" in schema:
        return schema["$ref"].rsplit("/", 1)[1]
    kind = schema.get("type", "any")
    if kind == "array":
        kind = f"list of {kind_of(schema['items'])}"
    bounds = [
        f"{sign} {schema[key]:g}"
        for key, sign in (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
        if key in schema
    ]
    return f"{kind} ({', '.join(bounds)})" if bounds else kind


def default_of(schema: dict[str, Any], *, is_required: bool) -> str:
    """A field's default as YAML shows it."""
    if is_required:
        return "required"
    default = schema.get("default")
    return "" if default in (None, [], "") or isinstance(default, dict) else f"`{default}`"


def said(spec: dict[str, Any], definitions: dict[str, Any]) -> str:
    """What a field means; of a section without a word of its own, what the section is."""
    if "description" in spec or "$ref" not in spec:
        return str(spec.get("description", ""))
    return str(definitions[spec["$ref"].rsplit("/", 1)[1]].get("description", ""))


def section(name: str, schema: dict[str, Any], definitions: dict[str, Any]) -> Iterator[str]:
    """The table of one section, then those of the sections inside it."""
    yield f"## {name}\n\n{schema.get('description', '').strip()}\n"
    yield "| field | type | default | meaning |\n|---|---|---|---|"
    nested: list[tuple[str, str]] = []
    for field, spec in schema["properties"].items():
        if LATER in spec:
            continue
        text = " ".join(said(spec, definitions).split()).replace("|", "\\|")
        yield (
            f"| `{field}` | {kind_of(spec)} | {default_of(spec, is_required=field in schema.get('required', ()))} "
            f"| {text} |"
        )
        options = (spec, spec.get("items", {}), *spec.get("anyOf", ()))
        nested += [(field, option["$ref"].rsplit("/", 1)[1]) for option in options if "$ref" in option]
    yield ""
    rules = schema.get(VALIDATIONS, ())
    if rules:
        yield "Refused with these words:\n"
        yield from (f"- {rule['message']}" for rule in rules)
        yield ""
    for field, definition in nested:
        prefix = "" if name == "WorkerConfig" else f"{name}."
        yield from section(f"{prefix}{field}", definitions[definition], definitions)


def configuration() -> str:
    """The reference of the worker's configuration file."""
    schema = WorkerConfig.model_json_schema(by_alias=True)
    lines = section("WorkerConfig", schema, schema["$defs"])
    return "# Configuration of a worker\n\n" + NOTE + "\n".join(lines)


def resource() -> str:
    """The reference of the resource."""
    spec, status = (model.model_json_schema(by_alias=True) for model in (Spec, Status))
    law = (
        "`apiVersion: ballast.dev/v1alpha1`, `kind: InferenceDeployment`, short name `infd`. What a rule refuses is "
        "refused by the API server, with the rule's words.\n\n"
    )
    lines = [*section("spec", spec, spec["$defs"]), *section("status", status, status["$defs"])]
    return "# InferenceDeployment\n\n" + NOTE + law + "\n".join(lines)


def role_rules(granted: tuple[permissions.Permission, ...]) -> str:
    """What a role of the chart grants the operator."""
    return yaml.safe_dump(permissions.rules(granted), sort_keys=False)


def chart() -> str:
    """The reference of the chart's values, from their schema and defaults."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    described = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    rows = "\n".join(chart_rows(described, defaults, ""))
    law = "`helm install ballast helm/ballast`; Helm refuses values that are not in this list.\n\n"
    return "# Values of the chart\n\n" + NOTE + law + "| value | default | meaning |\n|---|---|---|\n" + rows


def chart_rows(described: dict[str, Any], defaults: dict[str, Any], prefix: str) -> Iterator[str]:
    """A row for each value, those inside it below."""
    for name, member in described["properties"].items():
        if name not in defaults:
            continue
        path, default = f"{prefix}{name}", defaults[name]
        is_group = "properties" in member
        shown = "" if is_group or default in ("", [], {}) else f"`{json.dumps(default)}`"
        yield f"| `{path}` | {shown} | {member['description']} |"
        if is_group:
            yield from chart_rows(member, default, f"{path}.")


def commands() -> str:
    """The reference of the `ballast` command, from its own help."""
    command = [sys.executable, "-m", "typer", "ballast_cli.app", "utils", "docs", "--name", "ballast"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    text = html.unescape(text.split("\n", 1)[1])
    text = re.sub(
        r"\nExamples:\n((?:  .*\n?)+)",
        lambda found: f"\n**Examples**:\n\n```sh\n{textwrap.dedent(found[1])}```\n",
        text,
    )
    return "# The ballast command\n\n" + NOTE + text.lstrip()


def nothing_yet() -> ScrapeData:
    """What a worker that has served nobody would show a scrape."""
    counted = ClassStats()
    stats = EngineStats(
        slots=1, online=counted, offline=counted, kv_used=0, kv_cached=0, kv_free=0, kv_waste_ratio=0,
        kv_waste_mean_ratio=0, prefix_query_tokens=0, prefix_hit_tokens=0, steps=0, failed_steps=0, suspended_steps=0,
        deferred_grants=0, batch_ceiling=1, cost=CostModel(), cost_error_ratio=0, reservation=Reservation(),
        service={(RequestClass.ONLINE, "default"): 0.0},
    )  # fmt: skip
    items = QueueStats(at=0, items=RequestCounts(), inbox=0, oldest_waiting_seconds=0, dead_letters=0, jobs={})
    return ScrapeData(
        model="model", stats=stats, steps=StepMetrics(), recorders=(Recorder(),), spending=Spending(),
        utilization=Utilization(Footprint(*[1.0] * 7)),
        queue=QueueView("queue", is_up=True, stats=items, jobs_at_risk=0, held=0), block_tokens=16, generation=0,
        restart_required=0, config_invalid=False, is_draining=False, is_healthy=True,
    )  # fmt: skip


def metric_row(metric: Metric) -> str:
    """One metric as a table row: its name as scraped, kind, labels with the values they can take, meaning."""
    labels: dict[str, set[str]] = {}
    for sample in metric.samples:
        for label, value in sample.labels.items():
            labels.setdefault(label, set()).add(value)
    labels.pop("le", None)
    few = [f"{k}=" + "\\|".join(sorted(v)) if 1 < len(v) < 12 else k for k, v in labels.items()]
    name = metric.name + {"counter": "_total", "info": "_info"}.get(metric.type, "")
    return f"| `{name}` | {metric.type} | {', '.join(few)} | {metric.documentation} |"


def metrics() -> str:
    """The reference of `/metrics`, from the collector itself."""
    rows = "\n".join(metric_row(metric) for metric in WorkerMetrics(nothing_yet).collect())
    head = "| name | kind | labels | meaning |\n|---|---|---|---|\n"
    law = (
        "What `GET /metrics` of a worker shows. `vllm:*` repeats, for online requests alone, what Gateway-API routers "
        "read. A figure that is not known (the queue's, while Redis is away) is not exported.\n\n"
    )
    return "# Metrics\n\n" + NOTE + law + head + rows


def operator() -> str:
    """The reference of the operator's process: its environment and its metrics."""
    schema = OperatorSettings.model_json_schema()
    rows = [
        f"| `{PREFIX}{field.upper()}` | {kind_of(spec)} | "
        f"{default_of(spec, is_required=field in schema['required'])} | {' '.join(spec['description'].split())} |"
        for field, spec in schema["properties"].items()
    ]
    law = (
        "`ballast-operator` takes its settings from the environment; the Helm chart sets them. It serves `/metrics`, "
        "`/healthz` and `/readyz` on one port. Replicas elect the active one by a Lease.\n\n"
    )
    head = "| name | kind | default | meaning |\n|---|---|---|---|\n"
    found = "\n".join(metric_row(metric) for metric in OperatorMetrics().collect())
    metrics_head = "| name | kind | labels | meaning |\n|---|---|---|---|\n"
    return "# The operator\n\n" + NOTE + law + head + "\n".join(rows) + "\n\n## Metrics\n\n" + metrics_head + found


PAGES: dict[Path, Callable[[], str]] = {
    ROOT / "crds" / "ballast.dev_inferencedeployments.yaml": crd.text,
    CHART / "templates" / "crds" / "inferencedeployments.yaml": crd.chart_template,
    CHART / "files" / "cluster-rules.yaml": lambda: role_rules(permissions.CLUSTER),
    CHART / "files" / "own-namespace-rules.yaml": lambda: role_rules(permissions.OWN_NAMESPACE),
    CHART / "dashboards" / "ballast.json": dashboard.text,
    REFERENCE / "chart.md": chart,
    REFERENCE / "inferencedeployment.md": resource,
    REFERENCE / "configuration.md": configuration,
    REFERENCE / "commands.md": commands,
    REFERENCE / "metrics.md": metrics,
    REFERENCE / "operator.md": operator,
}
"""Every generated file and what gives its text."""


def main() -> int:
    """Write or check; the exit status is 1 where a page differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="files whose path contains one of these words; by default all")
    parser.add_argument("--check", action="store_true", help="write nothing, fail where a page differs")
    options = parser.parse_args()
    chosen = [path for path in PAGES if not options.only or any(word in str(path) for word in options.only)]
    stale = []
    for path in chosen:
        wanted = PAGES[path]().rstrip("\n") + "\n"
        if path.exists() and path.read_text(encoding="utf-8") == wanted:
            continue
        stale.append(path)
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted, encoding="utf-8")
            print(f"wrote {path}")
    for path in stale if options.check else []:
        print(f"{path} is not what the code says: run `make generate`", file=sys.stderr)
    unknown = [path for path in REFERENCE.glob("*.md") if path not in PAGES]
    for path in unknown:
        print(f"{path} is written by nobody: remove it or add it to docs/generate.py", file=sys.stderr)
    return 1 if (options.check and stale) or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
