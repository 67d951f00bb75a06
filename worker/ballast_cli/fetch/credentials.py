"""Keeps credentials in the environment usable, and out of messages.

A Secret often holds a value with a line break at its end, which no header of HTTP may contain. Libraries quote such a
header in their errors. The last line of a failed fetch becomes a condition of the resource, which more people may read
than the Secret.
"""

from __future__ import annotations

import os
import re

from ballast_cli.errors import Usage
from ballast_cli.fetch.location import Scheme

_SECRETS = {
    Scheme.HUB: ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
    Scheme.BUCKET: (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_SECURITY_TOKEN",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN",
    ),
}
_OTHERS = {
    Scheme.HUB: ("HF_ENDPOINT",),
    Scheme.BUCKET: ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"),
}
"""Variables that the same Secret may hold."""
_CREDENTIAL = re.compile(r"[!-~]+")
_URL = re.compile(
    r"^([a-z][a-z0-9+.-]*://)(?:[^/?#]*@)?((?:[^/?#:@\[\]]+|\[[^/?#@\[\]]+\])(?::[0-9]*)?(?:[/?#].*)?)$",
    re.IGNORECASE | re.DOTALL,
)
"""A URL: its scheme, and what follows the user and the password."""
_USERINFO = re.compile(r"^([a-z][a-z0-9+.-]*://)?.*@", re.IGNORECASE | re.DOTALL)


def clean_environment(scheme: Scheme, *, is_anonymous: bool = False) -> None:
    """Remove whitespace around the variables of a kind of source, and the empty ones among them.

    Raises:
        Usage: a credential that is used contains a character that no credential has. The message does not contain the
            value.
    """
    for name in (*_SECRETS[scheme], *_OTHERS[scheme]):
        value = os.environ.get(name)
        if value is None:
            continue
        if clean := value.strip():
            os.environ[name] = clean
        else:
            del os.environ[name]
        if clean and name in _SECRETS[scheme] and not is_anonymous and not _CREDENTIAL.fullmatch(clean):
            raise Usage(
                f"{name} contains whitespace or a character beyond ASCII, so it is no credential. Set it again (in a "
                "cluster, in the Secret that model.credentialsSecret names)."
            )


def without_userinfo(endpoint: str) -> str:
    """Return an endpoint without user and password: if it is no URL, without all that is before its last `@`."""
    url = _URL.fullmatch(endpoint)
    return url[1] + url[2] if url else _USERINFO.sub(r"\1", endpoint)
