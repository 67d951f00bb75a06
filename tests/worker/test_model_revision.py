"""What is part of the revision of a model, so that no other model continues an answer."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from served_vllm import running

from ballast_api.worker_config import WorkerConfig
from ballast_cli.fetch.directory import Directory
from ballast_cli.fetch.manifest import MANIFEST, Kept, Manifest, write_manifest
from ballast_vllm.engine_client import DECIDING
from ballast_worker.errors import NotServed
from ballast_worker.settings import model_revision

pytestmark = pytest.mark.anyio


async def revision(**arguments: Any) -> str:
    async with running(**arguments) as found:
        return found.server.revision


@pytest.mark.parametrize("field", DECIDING)
async def test_a_field_of_vllm_that_decides_tokens_is_part_of_the_revision(variables, field):
    assert await revision() == await revision()
    assert await revision() != await revision(model_config={field: "another"})


async def test_the_rendering_of_chats_is_part_of_the_revision(variables, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("<{{ messages }}>")

    async def revisions():
        stated = {"chat_template": str(file)}
        options = ({}, stated, {"chat_template": "[{{ messages }}]"}, {"chat_template": "tool.jinja"})
        thinking = {"default_chat_template_kwargs": {"enable_thinking": False}}
        return [await revision(**arguments) for arguments in (*options, stated | thinking)]

    before = await revisions()
    again = await revisions()
    file.write_text("({{ messages }})")
    after = await revisions()

    assert len(set(before)) == 5
    assert before == again
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True, True, False]


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja", "config.json"])
def test_a_file_that_decides_prompts_is_part_of_the_revision_of_a_directory(tmp_path, name):
    config = WorkerConfig.parse("model: {uri: /models/m}", "here.yaml")
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("<{{ messages }}>")
    before = model_revision(config, tmp_path)
    file.write_text("({{ messages }})")

    assert model_revision(config, tmp_path) != before


@pytest.mark.parametrize(
    ("revision", "is_one_version"),
    [("", False), ("main", False), ("v1", False), ("0123456789abcdef" * 2 + "0" * 8, True)],
)
def test_only_a_commit_names_a_version_without_its_files(tmp_path, revision, is_one_version):
    config = WorkerConfig.model_validate({"model": {"uri": "/models/m", "revision": revision}})
    zeros, other = bytes(1 << 20), bytearray(1 << 20)
    other[200_000] = 1  # between the samples
    for copy, weights in (("first", zeros), ("again", zeros), ("moved", bytes(other))):
        _fetched(tmp_path / copy, weights)
    first, again, moved = (model_revision(config, tmp_path / copy) for copy in ("first", "again", "moved"))

    assert first == again
    assert (first == moved) == is_one_version
    assert first.startswith(revision)
    assert (first == revision) == is_one_version, (
        "a worker with an older Ballast continues no answer of another version"
    )


@pytest.mark.parametrize("record", ["", "[]", '{"files": {"model.safetensors": {}}}'], ids=["no JSON", "list", "empty"])
def test_only_the_record_of_an_unchanged_file_names_its_content(tmp_path, record):
    config = WorkerConfig.parse("model: {uri: /models/m}", "here.yaml")
    file, changed = tmp_path / "model.safetensors", bytearray(1 << 20)
    changed[0] = 1
    _fetched(tmp_path, bytes(1 << 20))
    recorded = model_revision(config, tmp_path)
    file.write_bytes(changed)
    edited = model_revision(config, tmp_path)
    (tmp_path / MANIFEST).write_text(record)

    assert len({recorded, edited}) == 2
    assert model_revision(config, tmp_path) == edited


def _fetched(path, weights):
    """Write a directory as `ballast fetch` leaves it."""
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(weights)
    with Directory.open(path) as directory:
        kept = Kept.of(directory, "model.safetensors", hashlib.sha256(weights).hexdigest())
        write_manifest(directory, Manifest("hf://a/b@main", "", "v", {"model.safetensors": kept}))


@pytest.mark.parametrize(
    "make", [lambda file: file.symlink_to("nowhere"), lambda file: file.mkdir()], ids=["dangling", "directory"]
)
def test_a_file_of_the_model_that_cannot_be_read_is_named(tmp_path, make):
    config = WorkerConfig.parse("model: {uri: /models/m}", "here.yaml")
    make(tmp_path / "generation_config.json")

    with pytest.raises(NotServed, match=rf"{tmp_path}/generation_config\.json cannot be read"):
        model_revision(config, tmp_path)
