"""The commands of the tutorial, read from its page and run unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from release import Release
from tutorial import run_steps


@pytest.fixture
def folder(cluster: Cluster, release: Release, tmp_path: Path) -> Any:
    """Return the directory for the files of the job."""
    yield tmp_path
    cluster.kubectl("delete", "infd/laptop", "-n", "default", "--ignore-not-found")


def test_the_page_leads_from_a_release_to_a_finished_batch(cluster: Cluster, folder: Path) -> None:
    said = run_steps(cluster, "check", "apply", "online", "job", "results", folder=folder, seconds=600)

    results = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert "Succeeded" in said["check"].said
    assert '"object":"text_completion"' in said["online"].said
    assert {result["custom_id"] for result in results} == {f"item-{number}" for number in range(1, 201)}
    assert all(result["error"] is None for result in results)
