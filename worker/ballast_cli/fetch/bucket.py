"""`s3://`: objects under a prefix, through boto3 and its usual sources of credentials and of the endpoint."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import boto3
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError

from ballast_cli.errors import NotFound
from ballast_cli.fetch.location import Location
from ballast_cli.fetch.snapshot import File, Snapshot, choose, version_of
from ballast_cli.fetch.source import Denied, Unavailable

_PIECE = 1 << 17
_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a role (in a cluster: the Secret or service account of the "
    "model), or --anonymous for a public bucket"
)
_MD5_LENGTH = 32


class Bucket:
    """The objects under one prefix."""

    def __init__(self, location: Location, *, is_anonymous: bool = False) -> None:
        self._location = location
        signature = {"signature_version": UNSIGNED} if is_anonymous else {}
        self._config = Config(retries={"mode": "standard", "max_attempts": 5}, **signature)
        self._made: Any = None
        self._tags: dict[str, str] = {}
        """ETags of the listing."""

    def resolve(self) -> Snapshot:
        """List the prefix, and ask for the checksum of each file that is wanted."""
        place = self._location
        with self._sentences():
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=place.root, Prefix=self._key(""))
            listed = [
                File(found["Key"].removeprefix(self._key("")), found["Size"])
                for page in pages
                for found in page.get("Contents", ())
            ]
            if not listed:
                raise NotFound(f"{place}: no object under this prefix; name the one that holds config.json.")
            files = tuple(self._asked(file) for file in choose(listed, str(place)))
        tagged = (File(file.name, file.size, self._tags[file.name]) for file in files)
        return Snapshot(str(place), version_of(tagged), files)

    def _asked(self, file: File) -> File:
        head = self._client.head_object(Bucket=self._location.root, Key=self._key(file.name), ChecksumMode="ENABLED")
        self._tags[file.name] = head["ETag"]
        return File(file.name, file.size, _digest(head))

    @contextmanager
    def read(self, file: File, start: int) -> Iterator[Iterator[bytes]]:
        """Stream an object of the snapshot that was listed, from an offset."""
        asked = {"Range": f"bytes={start}-"} if start else {}
        asked |= {"IfMatch": self._tags[file.name]}
        with self._sentences():
            body = self._client.get_object(Bucket=self._location.root, Key=self._key(file.name), **asked)["Body"]
            with body:
                yield body.iter_chunks(_PIECE)

    def _key(self, name: str) -> str:
        return f"{self._location.path}/{name}" if self._location.path else name

    @property
    def _client(self) -> Any:
        if self._made is None:
            self._made = boto3.session.Session().client("s3", config=self._config)
        return self._made

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        """Say what is wrong as a sentence."""
        place = self._location
        try:
            yield
        except (NoCredentialsError, PartialCredentialsError):
            raise Denied(f"{place}: no credentials found; {_CREDENTIALS}.") from None
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            if code in {"NoSuchBucket", "NoSuchKey", "404"}:
                raise NotFound(
                    f"{place}: there is no such {'bucket' if code == 'NoSuchBucket' else 'object'}."
                ) from None
            if code in {"PreconditionFailed", "412"}:
                raise Unavailable(f"{place} was written to while it was fetched: run this again.") from None
            if code in {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "403", "401"}:
                raise Denied(f"{place}: access is refused ({code}); {_CREDENTIALS}.") from None
            raise Unavailable(f"{place}: the store answers {code or error}; try again later.") from None
        except BotoCoreError as error:
            raise Unavailable(f"{place}: {error} Check the network, the region and AWS_ENDPOINT_URL.") from None


def _digest(head: Mapping[str, Any]) -> str:
    """Give the checksum of a whole object: its SHA-256, or the ETag where that is an MD5 of the content.

    It is not for objects that were uploaded in parts, or that are encrypted with a key of their own.
    """
    if head.get("ChecksumSHA256") and head.get("ChecksumType") == "FULL_OBJECT":
        return f"sha256:{b64decode(head['ChecksumSHA256']).hex()}"
    tag = head["ETag"].strip('"')
    is_md5 = len(tag) == _MD5_LENGTH and "-" not in tag and head.get("ServerSideEncryption", "AES256") == "AES256"
    return f"md5:{tag}" if is_md5 and "SSECustomerAlgorithm" not in head else ""
