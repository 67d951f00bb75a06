"""`ballast-vllm` serves HTTPS, and takes up new certificates of a Secret volume while it runs."""

from __future__ import annotations

import json
import shutil
import ssl
from pathlib import Path

import httpx
import pytest
from small_models import config_of
from tls import LOOPBACK, OTHER, certificate_of, shown

pytestmark = pytest.mark.timeout(900)


def publish(volume: Path, pem: Path, number: int) -> None:
    """Swap the files of a Secret volume, as the kubelet does: by the symlink of their directory."""
    fresh, data = volume / f"..{number}", volume / "..data"
    before = data.resolve()
    fresh.mkdir(parents=True)
    for name in ("tls.crt", "tls.key"):
        (fresh / name).write_bytes(pem.read_bytes())
    swap = volume / "..data_tmp"
    swap.symlink_to(fresh.name)
    swap.replace(data)
    for name in ("tls.crt", "tls.key"):
        if not (volume / name).is_symlink():
            (volume / name).symlink_to(f"..data/{name}")
    if before != data:
        shutil.rmtree(before)


def test_each_new_certificate_of_a_secret_volume_is_shown_on_both_ports(launch, wandering_model, tmp_path, eventually):
    volume, path = tmp_path / "volume", tmp_path / "worker.yaml"
    publish(volume, LOOPBACK, 0)
    files = {"tlsCertFile": str(volume / "tls.crt"), "tlsKeyFile": str(volume / "tls.key")}
    with launch(path, config_of(wandering_model, slots=2, runtime=files)) as serving:
        runtime = json.loads(path.read_text())["runtime"]
        ports = runtime["port"], runtime["metricsPort"]
        trusted = ssl.create_default_context(cafile=str(LOOPBACK))
        with httpx.Client(base_url=serving.url, verify=trusted, timeout=60) as client:
            status = client.post("/v1/completions", json={"model": "m", "prompt": "Once", "max_tokens": 4}).status_code
            first = {shown(port) for port in ports}
            for number, pem in enumerate((OTHER, LOOPBACK, OTHER), 1):
                publish(volume, pem, number)
                for port in ports:
                    eventually(
                        lambda port=port, pem=pem: shown(port) == certificate_of(pem), f"certificate {number} on {port}"
                    )
            publish(volume, Path(__file__), 4)
            eventually(lambda: "certificate not loaded" in serving.log.read_text(), "a refused certificate")
            last = {shown(port) for port in ports}
            kept = client.get("/health").status_code

    assert (status, kept) == (200, 200), "the connection from before stays"
    assert (first, last) == ({certificate_of(LOOPBACK)}, {certificate_of(OTHER)})
