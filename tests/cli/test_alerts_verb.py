from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ballast_cli.alerts import alerts
from ballast_cli.app import app
from ballast_cli.errors import NotFound, Unreachable, Usage
from ballast_cli.manifests import from_cluster, from_file

SAMPLES = Path(__file__).parents[2] / "docs" / "samples"
INVALID = SAMPLES / "invalid" / "vllm.yaml"


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
        pytest.param("kind: Pod", "holds Pod, wanted at least one InferenceDeployment", id="another kind"),
        pytest.param("", "holds nothing", id="empty"),
        pytest.param(INVALID.read_text(), "The vLLM backend is not supported yet", id="invalid"),
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
    with pytest.raises(Usage, match="wanted either the NAME"):
        alerts(name=name, file=file)


@pytest.mark.parametrize(
    ("script", "error", "said"),
    [
        pytest.param(None, Unreachable, "kubectl, through which Ballast reads clusters, is not on the PATH", id="none"),
        pytest.param(
            """echo 'Error from server (NotFound): inferencedeployments "chat" not found' >&2; exit 1""",
            NotFound,
            "`ballast get -A` lists",
            id="not found",
        ),
        pytest.param("echo 'Unable to connect' >&2; exit 1", Unreachable, "Unable to connect", id="no server"),
    ],
)
def test_a_cluster_that_gives_no_resource_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, error: type[Exception], said: str
) -> None:
    if script is not None:
        program = tmp_path / "kubectl"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if script else str(tmp_path))

    with pytest.raises(error, match=said):
        from_cluster("chat", None)
