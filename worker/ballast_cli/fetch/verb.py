"""`ballast fetch`: bring a model's files to a directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ballast_cli.console import examples, say
from ballast_cli.errors import CliError, NotFound
from ballast_cli.fetch.location import FORMS, Location, Scheme, parse
from ballast_cli.fetch.source import Source, Unavailable
from ballast_cli.fetch.store import bring, is_whole, link, manifest_of
from ballast_cli.watch import progress

EXAMPLES = examples(
    "ballast fetch hf://Qwen/Qwen3-0.6B /models/qwen",
    "ballast fetch hf://org/name@v2 /work/model --cache /var/cache/models   # shared by the pods of a node",
    "ballast fetch s3://weights/llama-3-8b /models/llama",
)
_HASH = 16
CLAIMS = Path("/pvc")
"""Where volume claims are mounted, each under its name."""


def fetch(
    *,
    uri: Annotated[str, typer.Argument(metavar="URI", help=f"{escape(FORMS)}.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the model shall be found.")],
    revision: Annotated[str, typer.Option(help="Branch, tag or commit of a hub repository; default main.")] = "",
    cache: Annotated[
        Path | None,
        typer.Option(help="Keep files here, one directory for each version, and make DIR a link.", show_default=False),
    ] = None,
    is_anonymous: Annotated[
        bool, typer.Option("--anonymous", help="Read a public bucket without credentials.")
    ] = False,
    claims: Annotated[
        Path, typer.Option("--claims", envvar="BALLAST_CLAIMS", help="Directory with the mounted claims of pvc://.")
    ] = CLAIMS,
) -> None:
    """Bring the files of a model that an engine needs to DIR and check them; run again, it goes on where it stopped."""
    location = parse(uri, revision)
    if not location.is_remote:
        link(directory, _in_place(location, claims))
        say(f"{directory} is a link to {directory.resolve()}.")
        return
    directory = directory.absolute()
    found = bring_model(location, directory, cache, is_anonymous=is_anonymous)
    if cache:
        link(directory, found)
    say(f"{directory} holds {location}.")


def bring_model(location: Location, directory: Path, cache: Path | None, *, is_anonymous: bool = False) -> Path:
    """Download to `directory`, or to the version's own under `cache`; give where the files lie."""
    source = _source(location, is_anonymous=is_anonymous)
    try:
        snapshot = source.resolve()
    except Unavailable as error:
        kept = _kept(location, directory, cache)
        if kept is None:
            raise
        say(f"{error} Going on with the copy of it in {kept}.")
        return kept
    target = cache / f"{_slug(location)}-{snapshot.version[:_HASH]}" if cache else directory
    if is_whole(target, snapshot):
        return target
    megabytes = round(snapshot.size / 1e6)
    with progress(f"Fetching {location}, MB", megabytes) as advance:
        bring(source, snapshot, target, tell=say, advance=lambda count: advance(round(count / 1e6)))
    return target


def _source(location: Location, *, is_anonymous: bool) -> Source:
    try:
        if location.scheme is Scheme.HUB:
            from ballast_cli.fetch.hub import Hub  # noqa: PLC0415  its library is an extra

            return Hub(location)
        from ballast_cli.fetch.bucket import Bucket  # noqa: PLC0415  its library is an extra

        return Bucket(location, is_anonymous=is_anonymous)
    except ImportError as error:
        raise CliError(f"{location} needs {error.name}: pip install 'ballast[fetch]'.") from None


def _in_place(location: Location, claims: Path) -> Path:
    path = Path(location.path)
    if location.scheme is Scheme.CLAIM:
        mounted = claims / location.root
        if not mounted.is_dir():
            raise NotFound(
                f"{location}: no claim is mounted at {mounted}. In a cluster the operator mounts it there; elsewhere "
                "give the model's own path, or --claims."
            )
        path = mounted / location.path
    if not (path / "config.json").is_file():
        found = "holds no config.json" if path.is_dir() else "is no directory"
        raise NotFound(f"{location}: {path} {found}; wanted config.json, *.safetensors and tokenizer.json.")
    return path.absolute()


def _kept(location: Location, directory: Path, cache: Path | None) -> Path | None:
    """Find the newest whole copy of the same place."""
    asked = [directory] if cache is None else sorted(cache.glob(f"{_slug(location)}-*"), key=os.path.getmtime)
    whole = [path for path in asked if manifest_of(path).get("source") == str(location)]
    return whole[-1].absolute() if whole else None


def _slug(location: Location) -> str:
    return "-".join(part for part in (location.root, location.path) if part).replace("/", "--")
