from __future__ import annotations

import re
import sys
from itertools import chain
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ballast_cli.alerts import alerts
from ballast_cli.app import app
from ballast_cli.errors import CliError, Usage
from ballast_cli.manifests import from_cluster, from_file

SAMPLES = Path(__file__).parents[2] / "docs" / "samples"
INVALID = SAMPLES / "invalid" / "encoder-latency.yaml"


def test_rules_of_a_file_are_printed_as_a_rules_file() -> None:
    done = CliRunner().invoke(app, ["alerts", "-f", str(SAMPLES / "tenants.yaml"), "-n", "inference"])
    groups = yaml.safe_load(done.stdout)["groups"]

    assert done.exit_code == 0
    assert {group["name"].split("/")[1] for group in groups} == {"inference"}
    assert "&id" not in done.stdout, "rules are written out, not referred to"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(None, "cannot be read", id="missing"),
        pytest.param("a: [", "cannot be read as YAML", id="not YAML"),
        pytest.param("kind: Pod", "holds Pod, expected at least one InferenceDeployment", id="another kind"),
        pytest.param("", "holds nothing", id="empty"),
        pytest.param(
            INVALID.read_text(), "slo.latencyMilliseconds is the SLO of a model that returns vectors", id="invalid"
        ),
    ],
)
def test_a_file_without_a_valid_resource_says_what_it_holds(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "resource.yaml"
    if content is not None:
        path.write_text(content)

    with pytest.raises(Usage, match=said):
        from_file(path, None)


@pytest.mark.parametrize(("name", "file"), [(None, None), ("chat", INVALID)])
def test_either_a_name_or_a_file_is_wanted(name: str | None, file: Path | None) -> None:
    with pytest.raises(Usage, match="give the NAME of a resource"):
        alerts(name=name, file=file)


def test_a_match_selects_the_workers_of_one_resource(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    text = (SAMPLES / "tenants.yaml").read_text()
    path.write_text(f"{text}\n---\n{text}")

    with pytest.raises(Usage, match="holds 2 resources: --match would select the same workers"):
        alerts(file=path, match='job="chat"')


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["cluster"], "--label cluster: expected LABEL=VALUE"),
        (["cluster=eu", "region=a", "cluster=us"], "--label cluster=us: cluster has the value eu already"),
        (["__name__=up"], "--label __name__=up: the rules use the label __name__ themselves"),
    ],
    ids=["no value", "twice", "of Prometheus"],
)
def test_a_label_of_all_series_has_a_name_and_a_value(labels: list[str], said: str) -> None:
    with pytest.raises(Usage, match=said):
        alerts(file=SAMPLES / "tenants.yaml", label=labels)


@pytest.mark.parametrize("spec", [{}, {"runtime": {"ray": {}}}], ids=["a deployment", "on Ray"])
def test_a_label_that_the_rules_use_is_refused(tmp_path: Path, spec: dict[str, object]) -> None:
    path = tmp_path / "resource.yaml"
    manifest = yaml.safe_load((SAMPLES / "tenants.yaml").read_text())
    path.write_text(yaml.safe_dump(manifest | {"spec": manifest["spec"] | spec}))
    rules = yaml.safe_load(CliRunner().invoke(app, ["alerts", "-f", str(path)]).stdout)["groups"]
    text = yaml.safe_dump(rules)
    used = set(re.findall(r"(\w+)(?:=~|!~|!=|=)", text)) | set(
        chain(*(rule["labels"] for g in rules for rule in g["rules"]))
    )
    used |= {name for listed in re.findall(r"\b(?:by|on) \(([^)]*)\)", text) for name in re.findall(r"\w+", listed)}

    assert len(used) > 10
    for name in used:
        with pytest.raises(Usage, match=f"the rules use the label {name} themselves"):
            alerts(file=path, label=[f"{name}=x"])


def test_the_error_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)

    with pytest.raises(CliError, match=r"pip install 'ballast\[cluster\]'"):
        from_cluster("chat", None)
