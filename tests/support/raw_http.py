"""Requests as bytes."""

from __future__ import annotations


def post(body: bytes, *headers: str, url: str = "/v1/completions") -> bytes:
    """Return a request with a body."""
    lines = [f"POST {url} HTTP/1.1", "host: a", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body
