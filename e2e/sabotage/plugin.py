"""A pytest plugin that applies the sabotage BALLAST_E2E_SABOTAGE to the built images or to the installed chart."""

from __future__ import annotations

import os
import traceback
from collections.abc import Generator
from typing import Any

import pytest
from faults import FAULTS

FAULT = FAULTS[os.environ["BALLAST_E2E_SABOTAGE"]]


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Apply the sabotage after its fixture is set up. If that fails, end the run, because no test could detect it."""
    value: Any = yield
    try:
        if fixturedef.argname == "images" and FAULT.module:
            image = FAULT.image
            value[image] = request.getfixturevalue("cluster").provider.patch(image, FAULT.layer())
        elif fixturedef.argname == "release":
            FAULT.act(value)
    except Exception:  # noqa: BLE001 - whatever it was, it must not be taken for a test that failed
        pytest.exit(f"the sabotage itself failed:\n{traceback.format_exc()}", returncode=pytest.ExitCode.INTERNAL_ERROR)
    return value
