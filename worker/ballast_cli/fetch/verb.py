"""`ballast fetch`: download the files of a model to a directory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from glob import escape as escape_glob
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ballast_cli.console import examples, say
from ballast_cli.errors import CliError, NotFound, Usage
from ballast_cli.fetch.copies import named_at, remember
from ballast_cli.fetch.credentials import clean_environment
from ballast_cli.fetch.location import FORMS, Location, Scheme, parse
from ballast_cli.fetch.source import Source, Unavailable
from ballast_cli.fetch.store import download, is_complete, is_intact, link
from ballast_cli.interrupts import interruptible
from ballast_cli.watch import progress

EXAMPLES = examples(
    "ballast fetch hf://Qwen/Qwen3-0.6B /models/qwen",
    "ballast fetch hf://org/name@v2 /work/model --cache /var/cache/models   # the pods of a node share the cache",
    "ballast fetch s3://weights/llama-3-8b /models/llama",
)
_VERSION = 12
_KEY = 24
"""Digits in the name of a directory in a cache."""
CLAIMS = Path("/pvc")
"""Directory where volume claims are mounted, each under its name."""
Uri = Annotated[str, typer.Argument(metavar="URI", help=f"{escape(FORMS)}.")]
TargetDir = Annotated[
    Path, typer.Argument(metavar="DIR", help="Directory of the files. With --cache, it becomes a link.")
]
Revision = Annotated[str, typer.Option(help="Branch, tag, or commit of a hub repository. The default is main.")]
Cache = Annotated[
    Path | None,
    typer.Option(
        help="Keep the files here, one directory for each version, and make DIR a link. No version is deleted.",
        show_default=False,
    ),
]
Anonymous = Annotated[bool, typer.Option("--anonymous", help="Read a public bucket without credentials.")]
Adapter = Annotated[bool, typer.Option("--adapter", help="The files are a LoRA adapter, with adapter_config.json.")]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="Compare the checksums of files that exist already. By default, only those of files whose size, "
        "time, or inode has changed.",
    ),
]
MaxGigabytes = Annotated[
    float | None,
    typer.Option(min=0, help="Refuse a larger model. By default, the free disk is the limit.", show_default=False),
]
KeepFree = Annotated[
    float | None,
    typer.Option(
        "--keep-free-percent",
        envvar="BALLAST_KEEP_FREE_PERCENT",
        min=0,
        max=100,
        help="Share of the disk that must stay free. By default 15 on the disk of a Kubernetes node, which evicts pods "
        "below that, and 0 elsewhere. A fetch of at most 0.1 % of the disk is exempt.",
        show_default=False,
    ),
]
Claims = Annotated[
    Path, typer.Option("--claims", envvar="BALLAST_CLAIMS", help="Directory where the claims of pvc:// are mounted.")
]


def fetch(
    *,
    uri: Uri,
    directory: TargetDir,
    revision: Revision = "",
    cache: Cache = None,
    is_anonymous: Anonymous = False,
    is_adapter: Adapter = False,
    is_verified: Verify = False,
    max_gigabytes: MaxGigabytes = None,
    keep_free_percent: KeepFree = None,
    claims: Claims = CLAIMS,
) -> None:
    """Download a model to DIR and verify it.

    Only files that an engine needs are downloaded, and no code. An interrupted download resumes when the command runs
    again.
    """
    location = parse(uri, revision)
    _check_options(
        location,
        has_revision=bool(revision),
        is_anonymous=is_anonymous,
        is_copied=cache is not None or is_verified or max_gigabytes is not None,
    )
    if is_adapter:
        location = replace(location, config="adapter_config.json")
    if not location.is_remote:
        link(directory, _in_place(location, claims))
        say(f"{directory} is a link to {directory.resolve()}.")
        return
    directory = directory.absolute()
    max_bytes = None if max_gigabytes is None else int(max_gigabytes * 1e9)
    options = FetchOptions(
        is_anonymous=is_anonymous, is_verified=is_verified, max_bytes=max_bytes, keep_free_percent=keep_free_percent
    )
    found = fetch_model(location, directory, cache, options)
    if cache:
        link(directory, found)
    say(f"{directory} contains {location}.")


def _check_options(location: Location, *, has_revision: bool, is_anonymous: bool, is_copied: bool) -> None:
    """Refuse options that have no effect on this kind of location."""
    if has_revision and location.scheme is not Scheme.HUB:
        raise Usage(f"--revision is for hf://, and has no effect on {location}. Omit it.")
    if is_anonymous and location.scheme is not Scheme.BUCKET:
        raise Usage(f"--anonymous is for s3://, and has no effect on {location}. Omit it.")
    if is_copied and not location.is_remote:
        raise Usage(f"--cache, --verify and --max-gigabytes are for hf:// and s3://. {location} is not copied.")


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """Options of a download."""

    is_anonymous: bool = False
    is_verified: bool = False
    max_bytes: int | None = None
    keep_free_percent: float | None = None


@interruptible()  # as process 1 of a container, it would ignore SIGTERM
def fetch_model(
    location: Location, directory: Path, cache: Path | None, options: FetchOptions = FetchOptions()
) -> Path:
    """Download to `directory`, or to a directory for the version under `cache`. Return the directory of the files."""
    source = _source(location, is_anonymous=options.is_anonymous)
    is_shared = cache is not None
    copies = sorted(cache.glob(f"{escape_glob(_slug(location))}-*")) if cache else [directory]
    try:
        model = source.resolve()
    except Unavailable as error:
        kept = _kept(location, copies, options, origin=source.origin, is_shared=is_shared)
        if kept is None:
            raise
        say(f"{error} Using the copy in {kept}.")
        return kept
    target = cache / f"{_slug(location)}-{model.version[:_VERSION]}-{model.key[:_KEY]}" if cache else directory
    if not options.is_verified and is_complete(target, model, is_shared=is_shared):
        remember(target, location, model.version, is_shared=is_shared)
        return target
    if model.code:
        names = ", ".join(model.code[:3]) + (" ..." if model.code[3:] else "")
        say(
            f"{location} has code, which is not fetched: {names}. If vLLM needs it (--trust-remote-code), read it, "
            "copy all files of the model to a volume, and use pvc:// or a path."
        )
    megabytes = round(model.size / 1e6)
    with progress(f"Fetching {location}, MB", megabytes) as advance:
        download(
            source,
            model,
            target,
            advance=lambda count: advance(round(count / 1e6)),
            max_bytes=options.max_bytes,
            keep_free_percent=options.keep_free_percent,
            is_verified=options.is_verified,
            is_shared=is_shared,
            others=[path for path in copies if path != target],
        )
    remember(target, location, model.version, is_shared=is_shared)
    if unknown := [file.name for file in model.files if not file.digest]:
        say(
            f"{location} has no checksum for {', '.join(unknown)}. Damage on the way could not be detected. Ballast "
            "recorded its own checksums, which show later changes. S3 keeps a checksum of a whole file if it is "
            "uploaded in one part (at most 5 GB), for example by aws s3api put-object --checksum-algorithm SHA256."
        )
    return target


def _source(location: Location, *, is_anonymous: bool) -> Source:
    clean_environment(location.scheme, is_anonymous=is_anonymous)  # before the libraries read it
    try:
        if location.scheme is Scheme.HUB:
            from ballast_cli.fetch.hub import Hub  # noqa: PLC0415  its library is an extra

            return Hub(location)
        from ballast_cli.fetch.bucket import Bucket  # noqa: PLC0415  its library is an extra

        return Bucket(location, is_anonymous=is_anonymous)
    except ImportError as error:
        raise CliError(
            f"{location} needs {error.name}, which is not installed. Install it with pip install 'ballast[fetch]'."
        ) from None


def _in_place(location: Location, claims: Path) -> Path:
    path = Path(location.path)
    if location.scheme is Scheme.CLAIM:
        mounted = claims / location.root
        if not mounted.is_dir():
            raise NotFound(
                f"{location}: no claim is mounted at {mounted}. In a cluster, the operator mounts it. Elsewhere, name "
                "the path of the model, or set --claims."
            )
        path = mounted / location.path
    if not (path / location.config).is_file():
        found = f"has no {location.config}" if path.is_dir() else "is no directory"
        raise NotFound(f"{location}: {path} {found}. Name a directory with {location.config} and *.safetensors.")
    return path.absolute()


def _kept(
    location: Location, directories: Iterable[Path], options: FetchOptions, *, origin: str, is_shared: bool
) -> Path | None:
    """Return the intact copy that the location named last, at the same endpoint."""
    times = [(named_at(path, location, origin, is_shared=is_shared), path) for path in directories]
    for _, path in sorted(((time, path) for time, path in times if time is not None), reverse=True):
        if is_intact(path, is_verified=options.is_verified, is_shared=is_shared):
            return path.absolute()
    return None


def _slug(location: Location) -> str:
    return "-".join(part for part in (location.root, location.path) if part).replace("/", "--")
