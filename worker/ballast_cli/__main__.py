"""`ballast`, and `python -m ballast_cli`."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

import typer

from ballast_cli.app import app
from ballast_cli.console import say
from ballast_cli.errors import CliError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code. A user's mistake is a message on stderr, never a traceback."""
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
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise  # typer ends the program with code 1 if the pipe breaks
        # The reader (such as `head`) closed the pipe. Without this, the interpreter's flush at exit reports an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        names = " and ".join(str(name) for name in (error.filename, error.filename2) if name) or "the output"
        say(f"ballast: Cannot use {names} ({error.strerror or error}). Check path, permissions, and free space.")
        if error.errno == errno.ENOSPC:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # as above
        return 1
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
