"""`ballast alerts`: the alert rules of a resource, for a Prometheus that reads rules files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml

from ballast_cli.console import examples
from ballast_cli.errors import Usage

EXAMPLES = examples(
    "ballast alerts chat -n inference > chat.rules.yaml   # from the cluster",
    "ballast alerts -f chat.yaml | promtool check rules",
    "ballast alerts -f chat.yaml --match 'job=\"chat\"'     # if the scrape sets other labels",
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
        "--namespace", "-n", help="Namespace.", show_default="that of the kubeconfig's context or of the file"
    ),
]
Match = Annotated[
    str | None,
    typer.Option(help="PromQL label matchers of the scraped workers.", show_default='namespace="...",service="NAME"'),
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
    match: Match = None,
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
    # Building the resource's model takes longer than the start of any other command.
    from ballast_api.alerts import rule_groups  # noqa: PLC0415
    from ballast_cli.manifests import from_cluster, from_file  # noqa: PLC0415

    resources = from_file(file, namespace) if file else (from_cluster(name or "", namespace),)
    groups = [group for each in resources for group in rule_groups(each, match=match, runbooks=runbooks)]
    yaml.dump({"groups": groups}, sys.stdout, Dumper=_Plain, sort_keys=False, width=118)


class _Plain(yaml.SafeDumper):
    """Writes repeated values in full, because people read the rules."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002  the base class's form
        return True
