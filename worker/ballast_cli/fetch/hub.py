"""`hf://`: reads repositories of a hub with huggingface_hub. `HF_ENDPOINT` names another hub, `HF_TOKEN` a token."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import get_session

from ballast_cli.errors import CliError, NotFound, Usage
from ballast_cli.fetch.credentials import without_userinfo
from ballast_cli.fetch.location import Location
from ballast_cli.fetch.model_files import File, ModelFiles, code_of, select
from ballast_cli.fetch.source import Denied, Unavailable

_TOKEN = "Set HF_TOKEN (in a cluster, in the Secret that model.credentialsSecret names)"  # noqa: S105  a sentence
_SECONDS = 30.0
"""Time without a byte after which the hub does not answer."""


class Hub:
    """A repository at one revision."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._endpoint = os.environ.get("HF_ENDPOINT")
        self._token = os.environ.get("HF_TOKEN")
        self._commit = ""

    @property
    def origin(self) -> str:
        """Return the endpoint of the hub, without a password: a new one changes no file."""
        return without_userinfo(self._endpoint or "")

    def resolve(self) -> ModelFiles:
        """Return the commit of the revision and its files."""
        place = self._location
        api = HfApi(endpoint=self._endpoint, token=self._token)
        with self._sentences():
            info = api.model_info(place.root, revision=place.revision, files_metadata=True, timeout=_SECONDS)
        listed = [
            File(
                sibling.rfilename,
                sibling.size,
                f"sha256:{sibling.lfs.sha256}" if sibling.lfs else f"git:{sibling.blob_id}" if sibling.blob_id else "",
            )
            for sibling in info.siblings or ()
        ]
        if not info.sha or not re.fullmatch(r"[0-9a-f]{7,64}", info.sha):
            raise CliError(f"{place}: the hub named no commit, so versions cannot be told apart. Try again later.")
        self._commit = info.sha
        selected = select(listed, str(place), place.config, self.read)
        return ModelFiles(str(place), info.sha, selected, self.origin, code_of(listed))

    @contextmanager
    def read(self, file: File, start: int = 0) -> Iterator[Iterator[bytes]]:
        """Stream a file of the resolved commit from an offset."""
        url = hf_hub_url(self._location.root, file.name, revision=self._commit, endpoint=self._endpoint)
        headers = build_hf_headers(token=self._token) | {"Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        with self._sentences():
            stream = get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=_SECONDS)
            with stream as answer:
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


def _skip(pieces: Iterator[bytes], count: int) -> Iterator[bytes]:
    """Skip the first `count` bytes: a server without range support sends the whole file."""
    for piece in pieces:
        yield piece[count:]
        count = max(0, count - len(piece))
