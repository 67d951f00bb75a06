"""`s3://`: reads the objects under a prefix with boto3, which finds the credentials and the endpoint."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import boto3
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
)

from ballast_cli.errors import CliError, NotFound, Usage
from ballast_cli.fetch.credentials import without_userinfo
from ballast_cli.fetch.location import Location
from ballast_cli.fetch.model_files import File, ModelFiles, code_of, select, version_of
from ballast_cli.fetch.source import Denied, Unavailable

_PIECE = 1 << 17
_CREDENTIALS = (
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use a role (in a cluster, the Secret or the service account "
    "of the model). For a public bucket, use --anonymous, or in a cluster the keys of any account of the object store"
)
_MD5_LENGTH = 32
_MOST_OBJECTS = 100_000
_MOST_PAGES = 1_000
"""Objects and pages of the longest listing that is read. An object store that lies may not end it."""


class Bucket:
    """The objects under one prefix."""

    def __init__(self, location: Location, *, is_anonymous: bool = False) -> None:
        self._location = location
        signature = {"signature_version": UNSIGNED} if is_anonymous else {}
        self._config = Config(retries={"mode": "standard", "max_attempts": 5}, **signature)
        self._made: Any = None
        self._unchanged: dict[str, dict[str, Any]] = {}
        """The condition of S3 that each listed object meets until it changes."""

    @property
    def origin(self) -> str:
        """Return the endpoint of the object store, without a password: a new one changes no file."""
        with self._sentences():
            return without_userinfo(str(self._client.meta.endpoint_url))

    def resolve(self) -> ModelFiles:
        """List the prefix, and read the checksum of each file that an engine needs."""
        place = self._location
        with self._sentences():
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=place.root, Prefix=self._key(""))
            listed: list[File] = []
            for number, page in enumerate(pages, 1):
                found = page.get("Contents", ())
                listed += (File(each["Key"].removeprefix(self._key("")), each["Size"]) for each in found)
                if len(listed) > _MOST_OBJECTS or number > _MOST_PAGES:
                    raise CliError(
                        f"{place}: the list has more than {_MOST_OBJECTS:,} objects or {_MOST_PAGES:,} pages. Name the "
                        f"prefix that contains {place.config}."
                    )
            if not listed:
                raise NotFound(f"{place}: no object under this prefix. Name the prefix that contains {place.config}.")
            selected = select(listed, str(place), place.config, self.read)
            files = tuple(map(self._with_digest, selected))
        tagged = (File(file.name, file.size, "".join(map(str, self._unchanged[file.name].values()))) for file in files)
        return ModelFiles(str(place), version_of(tagged), files, self.origin, code_of(listed))

    def _with_digest(self, file: File) -> File:
        head = self._client.head_object(Bucket=self._location.root, Key=self._key(file.name), ChecksumMode="ENABLED")
        if tag := head.get("ETag"):
            self._unchanged[file.name] = {"IfMatch": tag}
        else:  # as of a file that was put into the directory of the store. The time has lost its fraction of a second
            self._unchanged[file.name] = {"IfUnmodifiedSince": head["LastModified"] + timedelta(seconds=1)}
        return File(file.name, file.size, best_digest(head))

    @contextmanager
    def read(self, file: File, start: int = 0) -> Iterator[Iterator[bytes]]:
        """Stream a listed object from an offset."""
        options: dict[str, Any] = {"Range": f"bytes={start}-"} if start else {}
        options |= self._unchanged.get(file.name, {})
        with self._sentences():
            body = self._client.get_object(Bucket=self._location.root, Key=self._key(file.name), **options)["Body"]
            with body:
                yield body.iter_chunks(_PIECE)

    def _key(self, name: str) -> str:
        return f"{self._location.path}/{name}" if self._location.path else name

    @property
    def _client(self) -> Any:
        if self._made is None:
            try:
                self._made = boto3.session.Session().client("s3", config=self._config)
            except ValueError:  # its text has the endpoint, with a password
                raise Usage(
                    "The endpoint or the region is not valid. Check AWS_ENDPOINT_URL, which starts with http:// or "
                    "https://, and the region."
                ) from None
        return self._made

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        """Turn errors of boto3 into errors of this package."""
        place = self._location
        try:
            yield
        except (NoCredentialsError, PartialCredentialsError):
            raise Denied(f"{place}: no credentials found. {_CREDENTIALS}.") from None
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            if code in {"NoSuchBucket", "NoSuchKey", "404"}:
                raise NotFound(
                    f"{place}: there is no such {'bucket' if code == 'NoSuchBucket' else 'object'}. Check the URI."
                ) from None
            if code in {"PreconditionFailed", "412", "InvalidRange", "416"}:  # a range is within the listed size
                raise CliError(f"{place} changed during the download. Run the command again.") from None
            if code in {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "403", "401"}:
                raise Denied(f"{place}: access denied ({code}). {_CREDENTIALS}.") from None
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", "with an error")
            raise Unavailable(f"{place}: the object store answered {code or status}. Try again later.") from None
        except (BotoCoreError, UnicodeError) as error:
            store = without_userinfo(self._made.meta.endpoint_url) if self._made else "the object store"
            raise Unavailable(
                f"{store} does not answer for {place} ({_reason(error)}). Check the network, the region and "
                "AWS_ENDPOINT_URL."
            ) from None


def _reason(error: Exception) -> str:
    """Return the kind of an error, and its text if that is about a setting. Other texts may quote a header or a URL."""
    kind, text = type(error).__name__, str(error).rstrip(".")
    return f"{kind}: {text}" if isinstance(error, (NoRegionError, ParamValidationError, ProfileNotFound)) else kind


def best_digest(head: Mapping[str, Any]) -> str:
    """Return the best checksum of the whole object: SHA-256, SHA-1, an ETag that is an MD5 of the content, or CRC-32.

    A checksum of an object that was uploaded in parts may be one of the parts' checksums. Its text then ends with the
    number of parts. The ETag is no MD5 either then, or if the object is encrypted with the user's key.
    """
    whole = {kind: head.get(f"Checksum{kind.upper()}", "") for kind in ("sha256", "sha1", "crc32")}
    if head.get("ChecksumType", "FULL_OBJECT") != "FULL_OBJECT":
        whole = {}
    digests = {kind: b64decode(text).hex() for kind, text in whole.items() if text and "-" not in text}
    tag = head.get("ETag", "").strip('"')
    is_md5 = len(tag) == _MD5_LENGTH and "-" not in tag and head.get("ServerSideEncryption", "AES256") == "AES256"
    if is_md5 and "SSECustomerAlgorithm" not in head:
        digests["md5"] = tag
    return next((f"{kind}:{digests[kind]}" for kind in ("sha256", "sha1", "md5", "crc32") if kind in digests), "")
