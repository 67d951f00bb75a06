"""`ballast alerts`: the alert rules of a resource, for a Prometheus that reads rules files."""

from __future__ import annotations

import re
import sys
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Annotated

import typer
import yaml

from ballast_cli.cluster import Context
from ballast_cli.connection import not_empty
from ballast_cli.console import examples
from ballast_cli.errors import Usage

EXAMPLES = examples(
    "ballast alerts chat -n inference > chat.rules.yaml   # from the cluster",
    "ballast alerts -f chat.yaml | promtool check rules",
    "ballast alerts -f chat.yaml --match 'job=\"chat\"'     # if the scrape sets other labels",
    "ballast alerts -f chat.yaml --label cluster=eu        # one Prometheus for several clusters",
)
Name = Annotated[
    str | None, typer.Argument(metavar="NAME", help="An InferenceDeployment in the cluster.", show_default=False)
]
File = Annotated[
    Path | None, typer.Option("--file", "-f", metavar="FILE", help="YAML file with the resource; - is standard input.")
]
Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        "-n",
        help="Namespace.",
        show_default="that of the kubeconfig's context or of the file",
        callback=not_empty,
    ),
]
Match = Annotated[
    str | None,
    typer.Option(
        help="PromQL label matchers of the scraped workers of one resource, in place of namespace and service.",
        show_default='namespace="...",service="NAME"',
    ),
]
LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)=([^"{}\\\n]+)')
Label = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LABEL=VALUE",
        help="Label that all series have, such as cluster=eu in a Prometheus that collects from several clusters. The "
        "rules select by it and set it. Repeat it for more.",
        show_default=False,
    ),
]
Runbooks = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Base URL of the runbook pages that alerts link to.", show_default="no link"),
]


def alerts(
    *,
    name: Name = None,
    file: File = None,
    namespace: Namespace = None,
    context: Context = None,
    match: Match = None,
    label: Label = None,
    runbooks: Runbooks = None,
) -> None:
    """Print the alert rules of a resource: burn rates of the SLO, and other alerts.

    The operator makes a PrometheusRule with the same rules if the cluster has that kind. Its rule for the head of a Ray
    cluster has a shorter time if no Redis keeps the state of the head.
    """
    if (name is None) == (file is None):
        raise Usage(
            f"Found {'both NAME and FILE' if name else 'neither NAME nor FILE'}: give the NAME of a resource in the "
            "cluster, or a FILE (-f)."
        )
    if file is not None and context is not None:
        raise Usage(f"--context names a cluster, and the resource is in {file}. Omit one of them.")
    # Building the resource's model takes longer than the start of any other command.
    from ballast_api.alerts.rule_groups import rule_groups  # noqa: PLC0415
    from ballast_api.alerts.series import RESERVED_LABELS  # noqa: PLC0415
    from ballast_cli.manifests import from_cluster, from_file  # noqa: PLC0415

    labels = _labels(label or (), RESERVED_LABELS)
    resources = from_file(file, namespace) if file else (from_cluster(name or "", namespace, context),)
    if match is not None and len(resources) > 1:
        raise Usage(f"{file} holds {len(resources)} resources: --match would select the same workers for all of them.")
    groups = [group for each in resources for group in rule_groups(each, match=match, labels=labels, runbooks=runbooks)]
    yaml.dump({"groups": groups}, sys.stdout, Dumper=_Plain, sort_keys=False, width=118)


def _labels(texts: Sequence[str], reserved: Container[str]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for text in texts:
        found = LABEL.fullmatch(text)
        if found is None:
            raise Usage(f"--label {text}: expected LABEL=VALUE, such as cluster=eu.")
        name, value = found.groups()
        if name in labels:
            raise Usage(f"--label {text}: {name} has the value {labels[name]} already. Give each label once.")
        if name in reserved or name.startswith("__"):
            raise Usage(f"--label {text}: the rules use the label {name} themselves. Use another name.")
        labels[name] = value
    return labels


class _Plain(yaml.SafeDumper):
    """Writes repeated values in full, because people read the rules."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002  the base class's form
        return True
