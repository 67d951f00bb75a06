from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from ballast_cli.app import app

VERBS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str) -> None:
    done = CliRunner().invoke(app, [verb, "--help"])

    assert done.exit_code == 0, done.exception
    assert verb in done.stdout
