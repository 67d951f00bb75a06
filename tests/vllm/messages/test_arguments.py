"""The arguments of `vllm serve` follow from the worker configuration."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from ballast_api.vllm_arguments import refusal
from ballast_api.worker_config import WorkerConfig
from ballast_vllm.__main__ import main, prepare_config
from ballast_vllm.arguments import NodeRank, serve_arguments
from ballast_worker.errors import MissingWorkerExtra, NotServed
from ballast_worker.preflight import prepare


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """Directories of a model, a draft model, and adapters of rank 8 and 20."""
    found = {name: tmp_path / name for name in ("model", "draft", "eight", "twenty")}
    for path in found.values():
        path.mkdir()
    for name, rank in (("eight", 8), ("twenty", 20)):
        (found[name] / "adapter_config.json").write_text(json.dumps({"r": rank}))
    return found


def arguments(places: dict[str, Path], *, is_cpu: bool = False, **sections: Any) -> list[str]:
    sections["engine"] = {"backend": "vllm"} | sections.get("engine", {})
    sections["model"] = {"uri": str(places["model"])} | sections.get("model", {})
    return serve_arguments(WorkerConfig.model_validate(sections), is_cpu=is_cpu)


FIELDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "servedName": ({"model": {"servedName": "llama"}}, ["--served-model-name=llama"]),
    "aliases": ({"model": {"aliases": ["org/m"]}}, ["--served-model-name", "model", "org/m"]),
    "dtype": ({"model": {"dtype": "float16"}}, ["--dtype=float16"]),
    "maxModelLen": ({"model": {"maxModelLen": 4096}}, ["--max-model-len=4096"]),
    "loadFormat": ({"model": {"loadFormat": "dummy"}}, ["--load-format=dummy"]),
    "slots": ({"slots": 7}, ["--max-num-seqs=7"]),
    "port": ({"runtime": {"port": 8123}}, ["--port=8123"]),
    "host": ({"runtime": {"host": "::"}}, ["--host=::"]),
    "tls": (
        {"runtime": {"tlsCertFile": "/tls/tls.crt", "tlsKeyFile": "/tls/tls.key"}},
        ["--ssl-certfile=/tls/tls.crt", "--ssl-keyfile=/tls/tls.key"],
    ),
    "tensorParallel": (
        {"runtime": {"tensorParallel": 4}},
        ["--tensor-parallel-size=4", "--distributed-executor-backend=mp"],
    ),
    "quantization": ({"engine": {"quantization": "fp8"}}, ["--quantization=fp8"]),
    "kvDtype": ({"engine": {"kvDtype": "fp8_e5m2"}}, ["--kv-cache-dtype=fp8_e5m2"]),
    "kvDtype int8": ({"engine": {"kvDtype": "int8"}}, ["--kv-cache-dtype=int8_per_token_head"]),
    "kvMemoryMebibytes": ({"engine": {"kvMemoryMebibytes": 2}}, ["--kv-cache-memory-bytes=2097152"]),
    "prefixCache": ({"engine": {"prefixCache": False}}, ["--no-enable-prefix-caching"]),
    "speculative": (
        {"engine": {"speculative": {"method": "ngram", "draftTokens": 3}}},
        ['--speculative-config={"method": "ngram", "num_speculative_tokens": 3}'],
    ),
}


@pytest.mark.parametrize("case", FIELDS)
def test_a_field_changes_the_arguments_of_vllm(case: str, places: dict[str, Path]) -> None:
    sections, expected = FIELDS[case]

    assert set(arguments(places, **sections)) - set(arguments(places)) == set(expected)


@pytest.mark.parametrize(("pod_ip", "host"), [("10.0.0.7", "0.0.0.0"), ("fd00::7", "::")])
def test_vllm_listens_where_kubernetes_probes_its_pod(
    pod_ip: str, host: str, places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POD_IP", pod_ip)

    assert f"--host={host}" in arguments(places, runtime={"host": "0.0.0.0"})


def test_only_the_adapters_in_a_step_and_the_load_format_may_also_be_arguments_of_the_resource(
    places: dict[str, Path],
) -> None:
    sections: dict[str, Any] = {
        "model": {"uri": str(places["model"]), "adapters": [{"name": "a", "uri": f"file://{places['eight']}"}]},
        "engine": {"backend": "vllm"},
        "runtime": {"nodes": 2},
    }
    for stated, _ in FIELDS.values():
        for section, fields in stated.items():
            sections[section] = {**sections[section], **fields} if isinstance(fields, dict) else fields
    config = WorkerConfig.model_validate(sections)
    found = serve_arguments(config, NodeRank(1, "10.0.0.1", 29500))
    names = {each.removeprefix("--").partition("=")[0] for each in found if each.startswith("--")}

    assert {name for name in names if refusal([name]) is None} == {"max-loras", "load-format"}


def test_without_a_field_vllm_decides(places: dict[str, Path]) -> None:
    decided = ("--dtype", "--max-model-len", "--max-num-seqs", "--kv-cache-", "--quantization", "--enable-lora",
               "--tensor-parallel-size", "--speculative-config", "--enable-prefix-caching", "--no-enable-")  # fmt: skip

    assert [each for each in arguments(places) if each.startswith(decided)] == []


def test_the_draft_model_is_named_by_its_directory(places: dict[str, Path]) -> None:
    speculative = {"method": "draftModel", "draftTokens": 2, "draftUri": f"file://{places['draft']}"}
    found = [each for each in arguments(places, engine={"speculative": speculative}) if "speculative" in each]
    expected = {"method": "draft_model", "num_speculative_tokens": 2, "model": str(places["draft"])}

    assert [json.loads(each.partition("=")[2]) for each in found] == [expected]


def test_adapters_are_loaded_by_name_with_the_largest_rank_that_vllm_knows(places: dict[str, Path]) -> None:
    adapters = [{"name": f"a/{name}", "uri": f"file://{places[name]}"} for name in ("eight", "twenty")]
    found = arguments(places, model={"adapters": adapters})
    modules = found[found.index("--lora-modules") + 1 :]

    assert {"--enable-lora", "--max-lora-rank=32", "--max-loras=2"} < set(found)
    assert [json.loads(each) for each in modules] == [
        {"name": "a/eight", "path": str(places["eight"])},
        {"name": "a/twenty", "path": str(places["twenty"])},
    ]


def test_at_most_eight_adapters_are_in_a_step_of_a_gpu_and_all_with_one_free_place_in_that_of_a_cpu(
    places: dict[str, Path],
) -> None:
    adapters = [{"name": f"a{number}", "uri": f"file://{places['eight']}"} for number in range(10)]

    assert "--max-loras=8" in arguments(places, model={"adapters": adapters})
    assert "--max-loras=11" in arguments(places, model={"adapters": adapters}, is_cpu=True)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no adapter": ({"name": "a", "uri": "file:///none"}, "directory /none does not exist"),
    "a model": ({"name": "a", "uri": "file://MODEL"}, "states no rank"),
    "the name of the model": ({"name": "model", "uri": "file://MODEL"}, "an adapter has the name of the model"),
    "an alias": ({"name": "org/m", "uri": "file://MODEL"}, "an adapter has the name of the model, org/m"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_directory_without_an_adapter_is_refused(case: str, places: dict[str, Path]) -> None:
    adapter, sentence = REFUSED[case]
    adapter = adapter | {"uri": adapter["uri"].replace("MODEL", str(places["model"]))}

    with pytest.raises(NotServed, match=sentence):
        arguments(places, model={"adapters": [adapter], "aliases": ["org/m"]})


def test_each_server_refuses_the_backend_of_the_other(places: dict[str, Path], tmp_path: Path) -> None:
    uri = str(places["model"])
    path = tmp_path / "native.yaml"
    path.write_text(f"model: {{uri: {uri}}}\n")

    with (
        pytest.raises(NotServed, match="start `ballast-vllm`"),
        prepare(WorkerConfig.model_validate({"model": {"uri": uri}, "engine": {"backend": "vllm"}})),
    ):
        pass
    with pytest.raises(NotServed, match="start `ballast-worker`"):
        prepare_config(WorkerConfig.load(path), path)


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [("httpx", "run `pip install 'ballast[vllm]'`"), ("vllm", "vLLM is not installed: install it")],
)
@pytest.mark.usefixtures("sigterm")
def test_the_program_names_what_to_install(
    missing: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else found(name))

    assert main(["--config", "worker.yaml"]) == MissingWorkerExtra.exit_code
    assert sentence in capsys.readouterr().err
