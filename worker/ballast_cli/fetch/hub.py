"""`hf://`: reads repositories of a hub with huggingface_hub. `HF_ENDPOINT` names another hub, `HF_TOKEN` a token.

A hub sends its files from other servers, to which it redirects. It is not trusted with the addresses of this network:
an answer of the metadata service of a cloud, or of a service inside of the cluster, would become a file of the model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any
from urllib.parse import quote

import httpx2
from huggingface_hub import constants, hf_hub_url, is_offline_mode
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import hf_raise_for_status
from huggingface_hub.utils._validators import validate_repo_id

from ballast_cli.errors import CliError, NotFound, Usage
from ballast_cli.fetch.credentials import without_userinfo
from ballast_cli.fetch.location import Location
from ballast_cli.fetch.model_files import File, ModelFiles, code_of, select
from ballast_cli.fetch.source import Denied, Unavailable

_TOKEN = "Set HF_TOKEN (in a cluster, in the Secret that model.credentialsSecret names)"  # noqa: S105  a sentence
_SECONDS = 30.0
"""Time without a byte after which the hub does not answer."""
_MOST_LISTING = 16 << 20
"""Bytes of the largest listing of a repository. One of 50,000 files has about as many."""
_OF_THE_CLOUD = frozenset({"168.63.129.16", "100.100.100.200", "192.0.0.192", "fd00:ec2::254"})
"""Services of a cloud for its own machines, such as for their metadata, that have no link-local address."""
_TRANSLATED = IPv6Network("64:ff9b::/96")
"""IPv4 addresses as NAT64 writes them."""


class Hub:
    """A repository at one revision."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._endpoint = os.environ.get("HF_ENDPOINT")
        self._token = os.environ.get("HF_TOKEN")
        self._commit = ""
        self._reach: int | None = None
        """How far inside of this network the hub is that answered first; see `_reach`."""
        checks: Any = {"request": [self._check_scheme], "response": [self._check_address]}
        none_kept = httpx2.Limits(max_keepalive_connections=0)  # so nothing is open after the last answer
        self._client = httpx2.Client(follow_redirects=True, timeout=_SECONDS, event_hooks=checks, limits=none_kept)

    @property
    def origin(self) -> str:
        """Return the endpoint of the hub, without a password: a new one changes no file."""
        return without_userinfo(self._endpoint or "")

    def resolve(self) -> ModelFiles:
        """Return the commit of the revision and its files."""
        place = self._location
        with self._sentences():
            validate_repo_id(place.root)
            found = self._listing()
            commit, listed = found.get("sha"), [_file(sibling) for sibling in found.get("siblings") or ()]
        if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{7,64}", commit):
            raise CliError(f"{place}: the hub named no commit, so versions cannot be told apart. Try again later.")
        self._commit = commit
        selected = select(listed, str(place), place.config, self.read)
        return ModelFiles(str(place), commit, selected, self.origin, code_of(listed))

    def _listing(self) -> dict[str, Any]:
        """Return what the hub knows about the revision."""
        place = self._location
        revision = quote(place.revision or constants.DEFAULT_REVISION, safe="")
        url = f"{self._endpoint or constants.ENDPOINT}/api/models/{place.root}/revision/{revision}"
        with self._answer(url, params={"blobs": True}) as answer:
            content = bytearray()
            for piece in answer.iter_raw():
                content += piece
                if len(content) > _MOST_LISTING:
                    raise Unavailable(
                        f"{place}: the hub's list of files has more than {_MOST_LISTING >> 20} MiB, which is more than "
                        "that of a model."
                    )
        read = httpx2.Response(
            answer.status_code, headers=answer.headers, content=bytes(content), request=answer.request
        )
        hf_raise_for_status(read)
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):  # a number of thousands of digits is a ValueError
            found = None
        if not isinstance(found, dict) or not isinstance(found.get("siblings") or [], list):
            raise json.JSONDecodeError("expected an object with a list of files", "", 0)
        return found

    @contextmanager
    def _answer(self, url: str, start: int = 0, **options: Any) -> Iterator[httpx2.Response]:
        """Ask for a URL. The answer is not compressed: its bytes are what a limit counts, and what a file has."""
        if is_offline_mode():
            raise OfflineModeIsEnabled
        headers = build_hf_headers(token=self._token) | {"Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        with self._client.stream("GET", url, headers=headers, **options) as answer:
            if (encoding := answer.headers.get("content-encoding", "identity")) != "identity":
                raise Unavailable(f"{self._location}: the hub sends {encoding} data, and it was asked for plain data.")
            yield answer

    def _check_scheme(self, request: httpx2.Request) -> None:
        """Refuse to follow a redirect that gives up encryption."""
        if request.url.scheme != "https" and (self._endpoint or constants.ENDPOINT).startswith("https:"):
            raise Unavailable(f"{self._location}: the hub redirects to {request.url.host} without https.")

    def _check_address(self, answer: httpx2.Response) -> None:
        """Refuse an answer from further inside of this network than the hub is."""
        try:
            reach = _reach(answer.extensions["network_stream"].get_extra_info("server_addr")[0])
        except OSError as error:  # the connection is lost
            raise httpx2.ReadError(str(error)) from None
        if self._reach is None:
            self._reach = reach
        if reach > self._reach:
            raise Unavailable(
                f"{self._location}: the hub redirects to {answer.request.url.host}, an address inside of this network. "
                "If that server is yours, set HF_ENDPOINT to an address of the hub inside of it, too."
            )

    @contextmanager
    def read(self, file: File, start: int = 0) -> Iterator[Iterator[bytes]]:
        """Stream a file of the resolved commit from an offset."""
        url = hf_hub_url(self._location.root, file.name, revision=self._commit, endpoint=self._endpoint)
        with self._sentences(), self._answer(url, start) as answer:
            if answer.status_code in {401, 403}:
                raise Denied(
                    f"{self._location}: the hub denied access to {file.name} ({answer.status_code}). {_TOKEN}."
                )
            if answer.status_code not in {200, 206}:
                raise Unavailable(f"{self._location}: the hub answered {answer.status_code} for {file.name}.")
            pieces = answer.iter_raw()  # raw: the bytes of a broken stream are kept
            yield _skip(pieces, start) if start and answer.status_code == 200 else pieces

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        """Turn errors of the hub into errors of this package."""
        place = self._location
        hub = self.origin or "the hub"
        try:
            yield
        except HFValidationError as error:
            raise Usage(f"{place} does not name a repository: {error}. Use hf://ORG/NAME.") from None
        except GatedRepoError:
            raise Denied(f"{place} is gated. Accept its terms on {hub}. {_TOKEN}.") from None
        except RevisionNotFoundError:
            raise NotFound(f"{place.root} has no revision {place.revision}. Name a branch, tag, or commit.") from None
        except RepositoryNotFoundError:
            advice = (
                "Check the name, and the access of the token in HF_TOKEN"
                if self._token
                else f"If it is private: {_TOKEN}"
            )
            raise NotFound(f"{hub} shows no repository {place.root}. {advice}.") from None
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status in {401, 403}:
                raise Denied(
                    f"{hub} denied access to {place} ({status}). {_TOKEN}. The token needs access to the repository."
                ) from None
            raise Unavailable(f"{hub} answered {status} for {place}. Try again later.") from None
        except OfflineModeIsEnabled:
            raise Unavailable(f"{place} cannot be fetched while HF_HUB_OFFLINE is set.") from None
        except json.JSONDecodeError:
            raise Unavailable(f"{hub} did not answer with JSON for {place}. Check HF_ENDPOINT and proxies.") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as error:
            raise Unavailable(
                f"{hub} does not answer for {place} ({_reason(error)}). Check the network and HF_ENDPOINT."
            ) from None


def _reason(error: Exception) -> str:
    """Return the kind of an error, and its text if that is from the system. Other texts may quote a header or a URL."""
    kind, text = type(error).__name__, str(error)
    return f"{kind}: {text}" if text and isinstance(error, (httpx2.NetworkError, httpx2.TimeoutException)) else kind


def _file(sibling: Any) -> File:
    """Return a file of a listing.

    Raises:
        JSONDecodeError: the hub announces something else.
    """
    try:
        name, size, stored, blob = sibling["rfilename"], sibling.get("size"), sibling.get("lfs"), sibling.get("blobId")
        digest = f"sha256:{stored['sha256']}" if stored else f"git:{blob}" if blob else ""
        if isinstance(name, str) and (size is None or 0 <= size < 1 << 63):
            return File(name, size, digest)
    except (TypeError, KeyError, AttributeError):
        pass
    raise json.JSONDecodeError("expected a file", "", 0)


def _reach(address: str) -> int:
    """Return how far inside of a network a server is: 0 public, 1 private, 2 of this machine, its link or its cloud."""
    found = ip_address(address)
    if isinstance(found, IPv6Address):
        inner = IPv4Address(int(found) & 0xFFFFFFFF) if found in _TRANSLATED else found.sixtofour
        found = found.ipv4_mapped or inner or found
    if found.is_link_local or found.is_loopback or str(found) in _OF_THE_CLOUD:
        return 2
    return int(not found.is_global)


def _skip(pieces: Iterator[bytes], count: int) -> Iterator[bytes]:
    """Skip the first `count` bytes: a server without range support sends the whole file."""
    for piece in pieces:
        yield piece[count:]
        count = max(0, count - len(piece))
