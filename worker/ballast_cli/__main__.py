"""`ballast`, and `python -m ballast_cli`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from ballast_cli.app import app
from ballast_cli.console import say
from ballast_cli.errors import CliError
from ballast_cli.streams import StandardStreams, standard_streams


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code. A user's mistake is a message on stderr, never a traceback."""
    with standard_streams() as streams:
        try:
            code = app(
                args=list(sys.argv[1:] if arguments is None else arguments), prog_name="ballast", standalone_mode=False
            )
            sys.stdout.flush()
        except CliError as error:
            say(f"ballast: {error}")
            return error.exit_code
        except typer.TyperException as error:
            if message := error.format_message():  # empty if the help was printed
                end = "" if message.endswith("?") else "."
                context = getattr(error, "ctx", None)
                command = context.command_path if context else "ballast"
                say(f"ballast: {message.rstrip('.')}{end} See `{command} --help`.")
            return error.exit_code
        except (KeyboardInterrupt, typer.Abort):
            return 130
        except SystemExit as error:
            if not isinstance(error.__context__, BrokenPipeError):
                raise
            return _failed(error.__context__, streams)  # typer and rich end the program if a pipe breaks
        except OSError as error:
            return _failed(error, streams)
        return code if isinstance(code, int) else 0


def _failed(error: OSError, streams: StandardStreams) -> int:
    """Report a file or a stream that cannot be used, and return the exit code.

    A reader of stdout that has enough, such as `head`, is no failure. Another pipe that breaks is one.
    """
    if isinstance(error, BrokenPipeError) and streams.is_unread:
        return 0
    names = " and ".join(str(name) for name in (error.filename, error.filename2) if name) or "the output"
    say(f"ballast: Cannot use {names} ({error.strerror or error}). Check path, permissions, and free space.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
