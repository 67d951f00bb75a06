"""Add a layer to the archive of an image without a container engine, so that a test can replace a file."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import time
from pathlib import Path


def add_layer(source: Path, target: Path, files: dict[str, str]) -> None:
    """Copy a docker archive and add one layer."""
    layer = layer_of(files)
    diff_id = hashlib.sha256(layer).hexdigest()
    with tarfile.open(source) as old, tarfile.open(target, "w") as new:
        manifest = json.load(extracted(old, "manifest.json"))
        config = json.load(extracted(old, manifest[0]["Config"]))
        for member in old:
            if member.name not in {"manifest.json", manifest[0]["Config"]} and not member.isdir():
                new.addfile(member, old.extractfile(member) if member.isfile() else None)
        config["rootfs"]["diff_ids"].append(f"sha256:{diff_id}")
        config.setdefault("history", []).append({"created_by": "sabotage"})
        written = json.dumps(config).encode()
        manifest[0]["Config"] = f"{hashlib.sha256(written).hexdigest()}.json"
        manifest[0]["Layers"].append(f"{diff_id}.tar")
        for name, data in (
            (f"{diff_id}.tar", layer),
            (manifest[0]["Config"], written),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            add(new, name, data)


def layer_of(files: dict[str, str]) -> bytes:
    """Return the files as a layer. Their time is now, so that Python does not use the bytecode of the old files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, text in files.items():
            add(tar, path.lstrip("/"), text.encode())
    return buffer.getvalue()


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add one file that all users may read."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(data), 0o644, int(time.time())
    tar.addfile(info, io.BytesIO(data))


def extracted(tar: tarfile.TarFile, name: str) -> io.BufferedReader:
    """Return a file of the archive."""
    found = tar.extractfile(name)
    assert isinstance(found, io.BufferedReader), name
    return found
