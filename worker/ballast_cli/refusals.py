"""Turns errors of the simulator into errors of the command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ballast_cli.errors import CliError, Usage
from ballast_cli.sim_options import show_progress


@contextmanager
def refusals() -> Iterator[None]:
    """Turn an error of the simulator or the planner into a message and an exit code."""
    from ballast_api.errors import InvalidConfig  # noqa: PLC0415  numpy, for this verb only
    from ballast_sim.errors import Impossible, PolicyDefect, SimError  # noqa: PLC0415

    try:
        yield
    except Impossible as error:
        raise CliError(f"{error}.") from error
    except PolicyDefect as error:
        raise CliError(f"The policy broke its contract, which is a bug in Ballast: {error}") from error
    except (SimError, InvalidConfig) as error:
        raise Usage(str(error)) from error
    finally:
        show_progress()  # an error begins a line of its own
