"""`ballast fetch`: every source, broken off, damaged, denied, full, at the same time."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from ballast_api.errors import InvalidConfig
from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import API_VERSION, KIND
from ballast_cli import worker_file
from ballast_cli.__main__ import main
from ballast_cli.errors import CliError
from ballast_cli.fetch import store
from ballast_cli.fetch.credentials import without_userinfo
from ballast_cli.fetch.location import Scheme, parse
from ballast_cli.fetch.manifest import MANIFEST

FROM_HUB = "hf://org/name"


def fetch(*arguments: object) -> int:
    return main(["fetch", *map(str, arguments)])


def holds(directory: Path, files: dict[str, bytes], needed: set[str]) -> bool:
    there = {path.name for path in directory.iterdir() if not path.name.startswith(".")}
    return there == needed and all((directory / name).read_bytes() == files[name] for name in needed)


NEEDED = {"config.json", "tokenizer.json", "model.safetensors"}


def test_only_files_that_an_engine_needs_come_from_a_hub(hub: Any, tmp_path: Path) -> None:
    assert fetch(FROM_HUB, tmp_path / "model") == 0
    assert holds(tmp_path / "model", hub.files, NEEDED)


VOCABULARIES = ("tiktoken.model", "qwen.tiktoken", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model")
"""Names that tokenizers of vLLM and transformers look for, beside those of JSON and text."""


def test_vocabularies_of_all_tokenizers_come_and_code_is_named_before_the_download(
    hub: Any, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ballast_cli.watch._PLAIN_SECONDS", 0.0)
    code = [f"modeling_{letter}.py" for letter in "abcd"]
    hub.files |= dict.fromkeys((*VOCABULARIES, *code, "folder/hidden.py"), b"x")
    for name in (*VOCABULARIES, *code):
        bucket.put_object(Bucket=bucket.name, Key=f"models/llama/{name}", Body=b"x")
    for place in (FROM_HUB, f"s3://{bucket.name}/models/llama"):
        model = tmp_path / place.partition(":")[0]
        assert fetch(place, model) == 0
        assert {path.name for path in model.iterdir()} >= {*NEEDED, *VOCABULARIES}
        assert not list(model.rglob("*.py"))
        told = capsys.readouterr().err
        assert "has code, which is not fetched: modeling_a.py, modeling_b.py, modeling_c.py .... If vLLM needs" in told
        assert told.index("has code") < told.index("Fetching")
        assert fetch(place, model) == 0
        assert "code" not in capsys.readouterr().err


def test_a_log_shows_progress(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ballast_cli.watch._PLAIN_SECONDS", 0.0)
    assert fetch(FROM_HUB, tmp_path / "model") == 0
    assert f"Fetching {FROM_HUB}@main, MB: 3 of 3" in capsys.readouterr().err


def test_a_broken_stream_is_resumed(hub: Any, tmp_path: Path) -> None:
    hub.cut_after = 1_000_000
    assert fetch(FROM_HUB, tmp_path / "model") == 0
    assert holds(tmp_path / "model", hub.files, NEEDED)
    starts = [asked for path, asked in hub.requests if path.endswith("model.safetensors") and asked]
    assert len(starts) >= 2, "three megabytes in pieces of one"


def test_a_server_without_ranges_works(hub: Any, tmp_path: Path) -> None:
    hub.knows_ranges = False
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors.part").write_bytes(hub.files["model.safetensors"][:1000])
    assert fetch(FROM_HUB, tmp_path / "model") == 0
    assert holds(tmp_path / "model", hub.files, NEEDED)


def test_damage_on_the_way_is_detected(hub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.damage = True
    assert fetch(FROM_HUB, tmp_path / "model") == 1
    said = capsys.readouterr().err
    assert "differed twice from the checksum" in said
    assert not (tmp_path / "model" / MANIFEST).exists()


def test_a_damaged_file_is_downloaded_again(hub: Any, tmp_path: Path) -> None:
    model = tmp_path / "model"
    fetch(FROM_HUB, model)
    (model / MANIFEST).unlink()
    weights = bytearray(hub.files["model.safetensors"])
    weights[5] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    assert fetch(FROM_HUB, model) == 0
    assert holds(model, hub.files, NEEDED)


@pytest.mark.parametrize(
    ("asked", "code", "words"),
    [
        ("hf://org/other", 3, "shows no repository org/other"),
        ("hf://org/name --revision nowhere", 3, "has no revision nowhere"),
        ("hf://org/a..b", 2, "does not name a repository"),
        ("hf://org", 2, "Use hf://ORG/NAME"),
        ("ftp://host/model", 2, "is not the location of a model"),
        ("hf://org/name@a --revision b", 2, "Use one of them"),
        ("pvc://claim/model", 3, "no claim is mounted"),
        ("file://host/model", 2, "three slashes"),
        ("/nowhere/at/all", 3, "is no directory"),
        ("s3://bucket/model --revision v2", 2, "--revision is for hf://"),
        ("hf://org/name --anonymous", 2, "--anonymous is for s3://"),
        ("pvc://claim --cache cache", 2, "are for hf:// and s3://"),
        ("pvc://claim --verify", 2, "are for hf:// and s3://"),
        ("pvc://claim --max-gigabytes 0", 2, "are for hf:// and s3://"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_a_wrong_location_is_reported(
    asked: str, code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri, *options = asked.split()
    assert fetch(uri, tmp_path / "model", *options) == code
    assert words in capsys.readouterr().err


def test_a_private_repository_needs_the_token(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.token = "secret"
    assert fetch(FROM_HUB, tmp_path / "model") == 3
    assert "HF_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert fetch(FROM_HUB, tmp_path / "model") == 0


SECRET = "s3cr3t"
TWO_LINES = {
    "HF_TOKEN": f"{SECRET}\nx",
    "AWS_SESSION_TOKEN": f"{SECRET}\nx",
    "AWS_SECRET_ACCESS_KEY": f"{SECRET}\u200b",
}


@pytest.mark.parametrize(
    ("scheme", "variables", "code", "words"),
    [
        pytest.param("hf", {"HF_TOKEN": f"{SECRET}\n", "HF_ENDPOINT": "{hub}\n"}, 0, "", id="a line break at the end"),
        pytest.param("hf", {"HF_TOKEN": f"\u00a0{SECRET} "}, 0, "", id="spaces around"),
        pytest.param(
            "s3", {"AWS_SESSION_TOKEN": f"{SECRET}\n", "AWS_DEFAULT_REGION": "us-east-1\n"}, 0, "", id="of S3"
        ),
        *(
            pytest.param("hf" if "HF" in name else "s3", {name: value}, 2, f"{name} contains", id=f"two lines: {name}")
            for name, value in TWO_LINES.items()
        ),
        pytest.param("s3", {"AWS_SHARED_CREDENTIALS_FILE": "{file}"}, 4, "(HTTPClientError)", id="two lines in a file"),
        *(
            pytest.param(scheme, {name: f"http://user:{SECRET}@127.0.0.1:9"}, 4, "http://127.0.0.1:9 does", id=name)
            for scheme, name in (("hf", "HF_ENDPOINT"), ("s3", "AWS_ENDPOINT_URL"))
        ),
        pytest.param(
            "hf", {"HF_ENDPOINT": f"http://user:{SECRET}/@127.0.0.1"}, 4, "(InvalidURL)", id="no URL of a hub"
        ),
        pytest.param(
            "s3",
            {"AWS_ENDPOINT_URL": f"user:{SECRET}@host"},
            2,
            "Check AWS_ENDPOINT_URL, which starts with http://",
            id="no URL of S3",
        ),
        pytest.param(
            "hf", {"HF_TOKEN": SECRET, "AWS_SECRET_ACCESS_KEY": f"{SECRET}\nx"}, 0, "", id="two lines of another source"
        ),
    ],
)
def test_a_credential_is_used_or_refused_and_never_shown(
    *, hub: Any, bucket: Any, scheme: str, variables: dict[str, str], code: int, words: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    file = tmp_path / "credentials"
    file.write_text(f"[default]\naws_access_key_id=a\naws_secret_access_key=b\naws_session_token={SECRET}\n  x\n")
    if "AWS_SHARED_CREDENTIALS_FILE" in variables:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(hub=hub.url, file=file))
    hub.token = SECRET
    place = FROM_HUB if scheme == "hf" else f"s3://{bucket.name}/models/llama"

    assert fetch(place, tmp_path / "model") == code
    said = capsys.readouterr().err
    assert words in said
    assert SECRET not in said


@pytest.mark.parametrize(
    ("endpoint", "shown"),
    [
        ("https://hub.example/api@v2?a=b@c", "https://hub.example/api@v2?a=b@c"),
        (f"https://user:{SECRET}@hub.example:8443/api@v2", "https://hub.example:8443/api@v2"),
        (f"HTTP://{SECRET}@[::1]:80/@", "HTTP://[::1]:80/@"),
        (f"http://user:{SECRET}/@hub.example", "http://hub.example"),
        (f"user:{SECRET}@hub.example", "hub.example"),
        ("hub.example", "hub.example"),
    ],
)
def test_an_endpoint_is_shown_with_its_host_and_without_user_and_password(endpoint: str, shown: str) -> None:
    assert without_userinfo(endpoint) == shown


def test_a_public_bucket_needs_no_usable_credential(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in bucket.files:
        bucket.put_object_acl(Bucket=bucket.name, Key=f"models/llama/{name}", ACL="public-read")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{SECRET}\nx")
    assert fetch(f"s3://{bucket.name}/models/llama", tmp_path / "model", "--anonymous") == 0


def test_an_empty_token_is_none_and_a_new_password_of_the_endpoint_downloads_nothing(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    for password in ("old", "new"):
        monkeypatch.setenv("HF_ENDPOINT", hub.url.replace("://", f"://user:{password}@"))
        assert fetch(FROM_HUB, tmp_path / password, "--cache", tmp_path / "cache") == 0
    assert len([path for path, _ in hub.requests if path.endswith("/model.safetensors")]) == 1
    assert json.loads((tmp_path / "new" / MANIFEST).read_text())["origin"] == hub.url


def test_a_hub_that_accepts_and_does_not_answer_is_away(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch(FROM_HUB, tmp_path / "model")
    monkeypatch.setattr("ballast_cli.fetch.hub._SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert fetch(FROM_HUB, tmp_path / "model") == 4
    assert "does not answer" in capsys.readouterr().err


def test_the_error_of_a_location_without_weights_lists_its_files(
    hub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del hub.files["model.safetensors"], hub.files["consolidated.safetensors"]
    assert fetch(FROM_HUB, tmp_path / "model") == 1
    assert "has no weights" in (said := capsys.readouterr().err)
    assert "pytorch_model.bin" in said


def test_without_network_a_complete_copy_is_used(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    fetch(FROM_HUB, tmp_path / "a", "--cache", cache)
    hub.is_away = True
    assert fetch(FROM_HUB, tmp_path / "b", "--cache", cache) == 0
    assert "Using the copy" in capsys.readouterr().err
    assert holds(tmp_path / "b", hub.files, NEEDED)
    assert fetch("hf://org/other", tmp_path / "c", "--cache", cache) == 4
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert fetch(FROM_HUB, tmp_path / "d", "--cache", cache) == 4, "the copy of another hub"


def test_a_hub_that_may_not_be_asked_or_answers_with_a_page_is_away(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch(FROM_HUB, tmp_path / "model")
    hub.is_page = True
    assert fetch(FROM_HUB, tmp_path / "model") == 0
    assert "did not answer with JSON" in capsys.readouterr().err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert fetch(FROM_HUB, tmp_path / "model") == 0
    assert "while HF_HUB_OFFLINE is set. Using the copy" in capsys.readouterr().err


def test_a_cache_holds_each_version_once_and_the_name_is_a_link(hub: Any, tmp_path: Path) -> None:
    cache, name = tmp_path / "cache", tmp_path / "models" / "llama"
    fetch(FROM_HUB, name, "--cache", cache)
    fetch(f"{FROM_HUB}@v2", tmp_path / "other", "--cache", cache)
    (version,) = cache.iterdir()
    assert re.fullmatch("org--name-0123456789ab-[0-9a-f]{24}", version.name), "the same commit"
    assert name.is_symlink()
    assert holds(name, hub.files, NEEDED)


def test_during_an_outage_a_name_is_the_version_that_it_named_last(hub: Any, tmp_path: Path) -> None:
    cache, old, new = tmp_path / "cache", hub.commit, "f" * 40

    def version(revision: str) -> str:
        code = fetch(f"{FROM_HUB}@{revision}", tmp_path / "model", "--cache", cache)
        return (tmp_path / "model").resolve().name.split("-")[3] if code == 0 else str(code)

    assert version("main") == old[:12]
    hub.commit = new
    assert [version("main"), version("v2")] == [new[:12]] * 2
    hub.commit = old
    assert version("main") == old[:12], "moved back"
    hub.is_away = True
    assert {name: version(name) for name in ("main", "v2", old, new, "v3")} == {
        "main": old[:12], "v2": new[:12], old: old[:12], new: new[:12], "v3": "4",
    }  # fmt: skip


def test_a_file_of_another_model_is_not_shared(bucket: Any, tmp_path: Path) -> None:
    checksum = {"ChecksumAlgorithm": "SHA256"}
    for prefix in ("models/llama-2", "models/llama"):
        bucket.put_object(Bucket=bucket.name, Key=f"{prefix}/config.json", Body=b"{}")
        bucket.put_object(Bucket=bucket.name, Key=f"{prefix}/model.safetensors", Body=b"equal", **checksum)
        assert fetch(f"s3://{bucket.name}/{prefix}", tmp_path / prefix, "--cache", tmp_path / "cache") == 0
    assert {path.stat().st_nlink for path in (tmp_path / "cache").glob("*/*.safetensors")} == {1}


def test_versions_in_a_bucket_share_the_files_with_a_sha256(bucket: Any, tmp_path: Path) -> None:
    place = {"Bucket": bucket.name, "Key": "models/llama/model.safetensors"}
    bucket.put_object(**place, Body=bucket.files["model.safetensors"], ChecksumAlgorithm="SHA256")
    for version in (b"{}", b"[]"):
        bucket.put_object(Bucket=bucket.name, Key="models/llama/config.json", Body=version)
        assert fetch(f"s3://{bucket.name}/models/llama", tmp_path / "model", "--cache", tmp_path / "cache") == 0

    links = {name: (tmp_path / "model" / name).stat().st_nlink for name in NEEDED}
    assert links == {"config.json": 1, "tokenizer.json": 1, "model.safetensors": 2}, "another checksum needs a read"


@pytest.mark.parametrize("refusal", [None, errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, "files of another user"])
def test_a_new_version_downloads_only_the_files_that_differ(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int | str | None
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(refusal, "refused")

    if isinstance(refusal, str):
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    elif refusal is not None:
        monkeypatch.setattr(os, "link", refuse)
    hub.files |= {"modules.json": b'[{"path": "head"}]', "head/model.safetensors": b"vectors"}
    fetch(FROM_HUB, tmp_path / "old", "--cache", tmp_path / "cache")
    former = dict(hub.files)
    hub.commit = "f" * 40
    hub.files["config.json"] = former["config.json"].swapcase()
    hub.requests.clear()

    assert fetch(FROM_HUB, tmp_path / "new", "--cache", tmp_path / "cache") == 0
    for place, files in (("old", former), ("new", hub.files)):
        for name in (*NEEDED, "head/model.safetensors"):
            assert (tmp_path / place / name).read_bytes() == files[name]
    loaded = {path.removeprefix(f"/org/name/resolve/{hub.commit}/") for path, _ in hub.requests if "/resolve/" in path}
    named = {"config.json", "modules.json"}  # modules.json is read to select the files
    assert loaded == (named if refusal is None else named | NEEDED | {"head/model.safetensors"})
    assert fetch(FROM_HUB, tmp_path / "old", "--cache", tmp_path / "cache", "--verify") == 0


def test_a_directory_with_content_is_not_replaced(hub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "name").mkdir()
    (tmp_path / "name" / "mine").write_text("precious")
    assert fetch(FROM_HUB, tmp_path / "name", "--cache", tmp_path / "cache") == 2
    assert "not empty" in capsys.readouterr().err
    assert (tmp_path / "name" / "mine").read_text() == "precious"
    assert hub.requests


def test_a_moved_branch_replaces_what_was_there(hub: Any, tmp_path: Path) -> None:
    model = tmp_path / "model"
    hub.files["merges.txt"] = b"old"
    fetch(FROM_HUB, model)
    del hub.files["merges.txt"]
    hub.files["config.json"] = b'{"new": true}'
    whole = json.loads((model / MANIFEST).read_text())
    (model / MANIFEST).write_text(json.dumps(whole | {"version": "an older commit"}))
    assert fetch(FROM_HUB, model) == 0
    assert holds(model, hub.files, NEEDED)


def test_an_update_in_place_may_use_the_space_of_the_files_that_it_replaces(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, old = tmp_path / "model", hub.files["model.safetensors"]
    fetch(FROM_HUB, model)
    whole = json.loads((model / MANIFEST).read_text()) | {"version": "an older commit"}
    (model / MANIFEST).write_text(json.dumps(whole))
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))

    hub.files["model.safetensors"] = old * 2
    assert fetch(FROM_HUB, model) == 1
    assert "has 4.1 MB free, but the model needs 6.1 MB more" in capsys.readouterr().err
    assert json.loads((model / MANIFEST).read_text()) == whole, "the copy stays complete"
    assert (model / "model.safetensors").read_bytes() == old
    hub.files["model.safetensors"] = old[::-1]
    (tmp_path / "link").hardlink_to(model / "model.safetensors")
    assert fetch(FROM_HUB, model) == 1
    assert "has 1.0 MB free, but the model needs 3.1 MB more" in capsys.readouterr().err, (
        "a second name keeps its space"
    )
    (tmp_path / "link").unlink()
    assert fetch(FROM_HUB, model) == 0
    assert holds(model, hub.files, NEEDED)


@pytest.mark.parametrize("is_link", [False, True], ids=["", "a link has the name of a module"])
def test_the_modules_of_sentence_transformers_come_too(hub: Any, tmp_path: Path, is_link: bool) -> None:
    model, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    elsewhere.mkdir()
    if is_link:
        model.mkdir()
        (model / "1_Pooling").symlink_to(elsewhere)
    modules = {"1_Pooling/config.json": b"{}", "head/model.safetensors": b"x", "head/config.json": b"{}"}
    others = {"2_Old/config.json": b"{}", "head/pytorch_model.bin": b"x", "1_Pooling/a/config.json": b"{}"}
    named = b'[{"path": ""}, {"path": "1_Pooling"}, {"path": "head/"}, {"path": "3_Normalize"}]'
    hub.files |= modules | others | {"modules.json": named}
    if is_link:
        assert fetch(FROM_HUB, model) == 2
        assert list(elsewhere.iterdir()) == []
        return
    assert fetch(FROM_HUB, model) == 0
    assert {str(path.relative_to(model)): path.read_bytes() for path in model.glob("*/*")} == modules
    (model / "1_Pooling" / "config.json").write_bytes(b"{x")
    assert fetch(FROM_HUB, model) == 0
    assert (model / "1_Pooling" / "config.json").read_bytes() == b"{}"


def test_only_files_that_an_engine_needs_come_from_a_bucket(bucket: Any, tmp_path: Path) -> None:
    place = f"s3://{bucket.name}/models/llama"
    assert fetch(place, tmp_path / "model") == 0
    assert holds(tmp_path / "model", bucket.files, NEEDED)
    assert "/" not in json.loads((tmp_path / "model" / MANIFEST).read_text())["files"]
    for name, body in (("modules.json", b'[{"path": "head"}]'), ("head/config.json", b"{}")):
        bucket.put_object(Bucket=bucket.name, Key=f"models/llama/{name}", Body=body)
    assert fetch(place, tmp_path / "vectors") == 0
    assert (tmp_path / "vectors" / "head" / "config.json").read_bytes() == b"{}"


def test_a_changed_bucket_is_another_version(bucket: Any, tmp_path: Path) -> None:
    place, cache = f"s3://{bucket.name}/models/llama", tmp_path / "cache"
    fetch(place, tmp_path / "model", "--cache", cache)
    bucket.put_object(Bucket=bucket.name, Key="models/llama/config.json", Body=b'{"new": 1}')
    assert fetch(place, tmp_path / "model", "--cache", cache) == 0
    assert len(list(cache.iterdir())) == 2, "pods that read the older version keep it"
    assert (tmp_path / "model" / "config.json").read_bytes() == b'{"new": 1}'


@pytest.mark.parametrize("is_right", [True, False], ids=["resumed", "fetched again"])
def test_a_part_of_an_object_is_kept_if_it_is_what_its_tag_says(bucket: Any, tmp_path: Path, is_right: bool) -> None:
    model = tmp_path / "model"
    model.mkdir()
    part = bucket.files["model.safetensors"][:1_000_000] if is_right else b"x" * 1_000_000
    (model / "model.safetensors.part").write_bytes(part)
    assert fetch(f"s3://{bucket.name}/models/llama", model) == 0
    assert holds(model, bucket.files, NEEDED)


@pytest.mark.parametrize(
    ("place", "words"),
    [("s3://nobody/models", "no such bucket"), ("s3://{name}/models/other", "no object under this prefix")],
)
def test_a_wrong_bucket_is_reported(
    bucket: Any, place: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetch(place.format(name=bucket.name), tmp_path / "model") == 3
    assert words in capsys.readouterr().err


def test_a_bucket_without_credentials_is_reported(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch(f"s3://{bucket.name}/models/llama", tmp_path / "model") == 4
    assert "no credentials found" in capsys.readouterr().err


def test_claims_and_files_are_linked_and_not_copied(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tmp_path / "claims" / "weights" / "llama"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_bytes(hub.files["config.json"])
    monkeypatch.setenv("BALLAST_CLAIMS", str(tmp_path / "claims"))
    for place, name in (("pvc://weights/llama", "a"), (str(checkpoint), "b"), (checkpoint.as_uri(), "c")):
        assert fetch(place, tmp_path / name) == 0
        assert (tmp_path / name).resolve() == checkpoint
    assert fetch("pvc://weights/../llama", tmp_path / "d") == 2, "no way out of the claim"


def test_an_adapter_needs_its_own_configuration(hub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch(FROM_HUB, tmp_path / "adapter", "--adapter") != 0
    assert "has no adapter_config.json" in capsys.readouterr().err

    hub.files["adapter_config.json"] = hub.files.pop("config.json")
    assert fetch(FROM_HUB, tmp_path / "model") != 0
    assert "has no config.json" in capsys.readouterr().err
    assert fetch(FROM_HUB, tmp_path / "adapter", "--adapter") == 0
    assert (tmp_path / "adapter" / "adapter_config.json").read_bytes() == hub.files["adapter_config.json"]


def test_an_adapter_in_place_is_found_by_its_own_configuration(tmp_path: Path) -> None:
    adapter = tmp_path / "sql"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")

    assert fetch(adapter, tmp_path / "a") == 3
    assert fetch(adapter, tmp_path / "b", "--adapter") == 0
    assert (tmp_path / "b").resolve() == adapter


# Crashes and neighbours


def _process(directory: Path, *options: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "ballast_cli", "fetch", FROM_HUB, str(directory), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 130), (signal.SIGINT, 130)])
def test_the_next_fetch_resumes_the_parts_of_a_killed_one(
    hub: Any, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    hub.stall_after = 1_500_000
    model = tmp_path / "model"
    part = model / "model.safetensors.part"
    process = _process(model)
    until(lambda: part.exists() and part.stat().st_size >= 1_000_000, seconds=60)
    process.send_signal(number)
    assert process.wait(timeout=25) == code, "while the hub sends nothing"
    assert process.stderr is not None
    process.stderr.close()
    hub.stall_after = None
    hub.go_on.set()
    assert not (model / MANIFEST).exists()
    kept = part.stat().st_size
    hub.requests.clear()
    assert fetch(FROM_HUB, model) == 0
    assert holds(model, hub.files, NEEDED)
    assert f"bytes={kept}-" in [asked for _, asked in hub.requests]


@pytest.mark.parametrize("is_cached", [False, True], ids=["one directory", "a cache of the node"])
def test_two_pods_that_start_at_once_download_once(hub: Any, tmp_path: Path, is_cached: bool) -> None:
    hub.stall_after = 1_500_000
    places = (tmp_path / "a", tmp_path / "b") if is_cached else (tmp_path / "model",) * 2
    options = ("--cache", str(tmp_path / "cache")) if is_cached else ()
    first, second = (_process(place, *options) for place in places)
    for process in (first, second):
        assert process.stderr is not None
    until(lambda: any(path.endswith("model.safetensors") for path, _ in hub.requests), seconds=60)
    until(lambda: sum("/api/models/" in path for path, _ in hub.requests) == 2, seconds=60)
    hub.stall_after = None
    hub.go_on.set()
    said = [process.communicate(timeout=60)[1].decode() for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], said
    assert [asked for path, asked in hub.requests if path.endswith("/model.safetensors")] == [None], said
    assert all(holds(place, hub.files, NEEDED) for place in places)


@given(st.text(max_size=40))
def test_any_text_is_a_location_or_a_clear_error(text: str) -> None:
    for uri in (text, f"hf://{text}", f"s3://{text}", f"pvc://{text}", f"file://{text}"):
        try:
            location = parse(uri)
        except CliError as error:
            assert "Use " in str(error)  # noqa: PT017
        else:
            assert location.scheme in Scheme
            assert ".." not in location.path.split("/") or location.scheme != Scheme.CLAIM


PARTS = ["/", "//", ".", "..", "...", "a", "b", "@", "main", "-", ":", "#", "%2e", " ", "\n", "ä", "localhost"]


@given(
    scheme=st.sampled_from(["hf", "s3", "pvc", "file"]),
    rest=st.lists(st.sampled_from(PARTS), max_size=8).map("".join)
    | st.from_regex(r"/{0,2}a/b(@[a-z@/]*)?/*", fullmatch=True),
    revision=st.sampled_from(["", "main", "a"]),
)
def test_a_resource_names_only_locations_that_a_fetch_reads(scheme: str, rest: str, revision: str) -> None:
    manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "a"}}
    uri = f"{scheme}://{rest}"
    try:
        InferenceDeployment.read(manifest | {"spec": {"model": {"uri": uri, "revision": revision}}}, "here")
    except InvalidConfig:
        if scheme == "hf" and uri.isascii() and uri.isprintable():
            with pytest.raises(CliError):
                parse(uri, revision)
    else:
        parse(uri, revision)


def test_a_worker_serves_the_copy_under_the_name_of_the_original(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(worker_file, "_FETCHED", {})
    composed = worker_file.compose(None, worker_file.Flags(model=f"{FROM_HUB}@v2"))
    copy = Path(composed.model.uri)
    assert copy.is_relative_to(tmp_path / "ballast" / "models")
    assert holds(copy, hub.files, NEEDED)
    assert (composed.model.served_name, composed.model.revision) == ("name", copy.name)
    assert copy.name.startswith("org--name-0123456789ab-")
    hub.requests.clear()
    assert worker_file.compose(None, worker_file.Flags(model=f"{FROM_HUB}@v2")) == composed
    assert hub.requests == [], "a branch that moves changes nothing while a worker runs"
    assert worker_file.compose(None, worker_file.Flags(model=f"{FROM_HUB}@v2"), downloads=False) == composed
    with pytest.raises(CliError, match="waits for a restart"):
        worker_file.compose(None, worker_file.Flags(model=f"{FROM_HUB}@v3"), downloads=False)
