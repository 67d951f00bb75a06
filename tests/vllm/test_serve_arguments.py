"""vLLM's own parser takes the arguments of a worker configuration, and its sentences reach the user."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_models import config_of

from ballast_api.vllm_arguments import OWNED
from ballast_api.worker_config import WorkerConfig
from ballast_vllm.__main__ import BAD_ARGUMENTS, main
from ballast_vllm.arguments import MIDDLEWARE, SCHEDULER, NodeRank, serve_arguments
from ballast_vllm.errors import BadArguments
from ballast_vllm.versions import UnsupportedVllm
from ballast_worker.errors import NotServed, WorkerError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM use what others deprecated
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.platforms.interface import UnspecifiedPlatform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from ballast_vllm.hosted import open_app
    from ballast_vllm.serve import check, parsed, prepared


@pytest.fixture(scope="module")
def options() -> dict[str, str]:
    """The destination of each option of vLLM, by its name."""
    actions = make_arg_parser(FlexibleArgumentParser())._actions  # noqa: SLF001 -- argparse's
    return {name: action.dest for action in actions for name in action.option_strings}


def own(directory: Path, **sections: Any) -> list[str]:
    sections["engine"] = {"backend": "vllm"} | sections.get("engine", {})
    sections["model"] = {"uri": str(directory)} | sections.get("model", {})
    return serve_arguments(WorkerConfig.model_validate(sections))


def test_each_owned_argument_is_an_option_of_vllm(options: dict[str, str]) -> None:
    for group in OWNED:
        for name in (*(f"--{name}" for name in group.names), *(f"-{name}" for name in group.short)):
            assert any(known.startswith(name.removesuffix("*")) for known in options), name


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """The directory of an adapter. Its largest rank is 7, and vLLM is told 8."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "rank_pattern": {"q_proj": 7}}))
    return tmp_path


def test_a_field_of_the_configuration_arrives_in_vllm(tiny_model: Path, adapter: Path) -> None:
    found = parsed(
        own(
            tiny_model,
            model={
                "servedName": "tiny",
                "aliases": ["org/tiny", "old"],
                "dtype": "float32",
                "maxModelLen": 256,
                "loadFormat": "dummy",
                "adapters": [{"name": "sql", "uri": f"file://{adapter}"}],
            },
            engine={
                "kvDtype": "int8",
                "quantization": "fp8",
                "kvMemoryMebibytes": 64,
                "prefixCache": False,
                "speculative": {"method": "draftModel", "draftTokens": 3, "draftUri": f"file://{tiny_model}"},
            },
            slots=6,
            runtime={"host": "127.0.0.1", "port": 8123, "tensorParallel": 2},
        ),
        [],
    )

    assert (found.model_tag, found.served_model_name) == (str(tiny_model), ["tiny", "org/tiny", "old"])
    assert (found.dtype, found.max_model_len, found.load_format) == ("float32", 256, "dummy")
    assert (found.host, found.port) == ("127.0.0.1", 8123)
    assert (found.max_num_seqs, found.tensor_parallel_size) == (6, 2)
    assert (found.kv_cache_dtype, found.quantization) == ("int8_per_token_head", "fp8")
    assert (found.kv_cache_memory_bytes, found.enable_prefix_caching) == (64 * 2**20, False)
    assert found.speculative_config == {
        "method": "draft_model", "num_speculative_tokens": 3, "model": str(tiny_model),
    }  # fmt: skip
    assert (found.scheduler_cls, found.middleware) == (SCHEDULER, [MIDDLEWARE])
    assert (found.enable_lora, found.max_lora_rank, found.max_loras) == (True, 8, 1)
    assert [(module.name, module.path) for module in found.lora_modules] == [("sql", str(adapter))]


def test_an_argument_of_the_resource_reaches_vllm(tiny_model: Path) -> None:
    found = parsed(own(tiny_model), ["--enforce-eager", "--tool-call-parser", "hermes", "--enable-auto-tool-choice"])

    assert (found.enforce_eager, found.tool_call_parser, found.enable_auto_tool_choice) == (True, "hermes", True)


def test_an_argument_selects_a_format_that_vllm_loads_from_a_directory(tiny_model: Path) -> None:
    found = parsed(own(tiny_model), ["--load-format=runai_streamer"])
    check(parsed(own(tiny_model), ["--load-format=safetensors", "--tokenizer-revision=v2"]))

    assert found.load_format == "runai_streamer"


REFUSED = {
    "an unknown argument": (["--no-such"], "unrecognized arguments: --no-such"),
    "a wrong value": (["--max-num-batched-tokens=many"], "--max-num-batched-tokens: invalid"),
    "a choice that is none": (["--performance-mode=no"], "argument --performance-mode"),
    "a second model": (["other"], "unrecognized arguments: other"),
    "arguments that need another": (["--enable-auto-tool-choice"], "requires --tool-call-parser"),
    "help": (["--help"], "Remove --help"),
    "an abbreviation": (["--max-mod=5"], "engine.vllm.args sets --max-model-len: the section model decides"),
    "an underscore": (["--max_num_seqs=5"], "engine.vllm.args sets --max-num-seqs"),
    "a short name": (["-tp", "2"], "engine.vllm.args sets --tensor-parallel-size"),
    "a part of a structure": (["--speculative-config.method=ngram"], "engine.vllm.args sets --speculative-config"),
    "another revision": (["--revisio=v2"], "engine.vllm.args sets --revision: the section model decides"),
    "a key": (["--api-key=k"], "engine.vllm.args sets --api-key: fields of the resource decide"),
    "a format without weights": (["--load-format=dummy"], "engine.vllm.args sets --load-format: model.loadFormat"),
    "another scheduler": (["--scheduler-cls=a.B"], "engine.vllm.args sets --scheduler-cls"),
    "another middleware": (["--middleware=a.b"], "engine.vllm.args sets --middleware"),
    "other paths outside the access log": (
        ["--disable-access-log-for-endpoints=/metrics"],
        "engine.vllm.args sets --disable-access-log-for-endpoints: Ballast sets",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_sentence_of_vllm_or_of_ballast_states_what_is_refused(case: str, tiny_model: Path) -> None:
    arguments, sentence = REFUSED[case]

    with pytest.raises(BadArguments) as caught:
        parsed(own(tiny_model), arguments)

    assert sentence in str(caught.value)


RESET = {
    "tensor_parallel_size": "--tensor-parallel-siz=1",
    "dtype": "--dtyp=auto",
    "load_format": "--load-forma=auto",
    "host": "--hos=",
    "port": "--por=8000",
    "scheduler_cls": "--scheduler-cl=None",
    "max_lora_rank": "--max-lora-ran=16",
    "quantization": "-qNone",
}


@pytest.mark.parametrize("name", RESET)
def test_an_abbreviation_cannot_reset_an_argument_of_ballast_to_the_default_of_vllm(
    name: str, tiny_model: Path, adapter: Path
) -> None:
    arguments = own(
        tiny_model,
        model={
            "dtype": "float32",
            "loadFormat": "dummy",
            "adapters": [{"name": "sql", "uri": f"file://{adapter}"}],
        },
        engine={"quantization": "fp8"},
        runtime={"host": "127.0.0.1", "port": 8123, "tensorParallel": 2},
    )

    with pytest.raises(BadArguments, match=f"engine.vllm.args sets --{name.replace('_', '-')}:"):
        parsed(arguments, [RESET[name]])


NO_KV = r"on a CPU. Set one of fp8, fp8_e4m3, fp8_e5m2, or remove the field"


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        ({"quantization": "nonsense"}, "Unknown quantization method: nonsense"),
        *(({"kvDtype": name}, NO_KV) for name in ("int8", "nvfp4", "fp8_per_token_head")),
    ],
)
def test_a_type_that_vllm_lacks_is_refused_before_anything_is_loaded(
    engine: dict[str, str], sentence: str, tiny_model: Path
) -> None:
    arguments = parsed(own(tiny_model, engine=engine), [])

    with pytest.raises(BadArguments, match=sentence):
        check(arguments)


SPECULATORS = {
    "speculators_model_type": "eagle3",
    "speculators_config": {
        "proposal_methods": [{"speculative_tokens": 3}],
        "verifier": {"name_or_path": "other/model"},
    },
    "transformer_layer_config": {},
}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (json.dumps(SPECULATORS), r"names another model to serve, 'other/model'.*in model\.uri"),
        ("{", "valid JSON file"),
    ],
    ids=["a draft that names its model", "no JSON"],
)
def test_a_directory_is_served_as_itself_or_not_at_all(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(BadArguments, match=sentence):
        check(parsed(own(tmp_path), []))


def test_an_error_of_the_disk_gets_no_advice_about_a_hub(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/proc/self/mem")

    with pytest.raises(OSError, match="Input/output error"):
        check(parsed(own(tmp_path), []))


@pytest.mark.parametrize("stated", [None, "0"])
def test_vllm_downloads_nothing_unless_a_variable_states_otherwise(stated: str | None) -> None:
    code = (
        "import os, sys; from ballast_vllm.__main__ import main; main(['--config', '/none']); "
        "print('huggingface_hub' in sys.modules, os.environ['HF_HUB_OFFLINE'])"
    )
    variables = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    variables |= {} if stated is None else {"HF_HUB_OFFLINE": stated}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=variables, capture_output=True, text=True, check=True
    )

    assert found.stdout.split() == ["False", stated or "1"]


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e5m2", "bfloat16", None])
def test_a_kv_cache_that_vllm_has_on_a_cpu_is_accepted(kv_dtype: str | None, tiny_model: Path) -> None:
    check(parsed(own(tiny_model, engine={} if kv_dtype is None else {"kvDtype": kv_dtype}), []))


@pytest.fixture
def environment() -> Iterator[None]:
    """Take back the variables that a start sets for the processes of vLLM."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("environment")
def test_without_a_gpu_the_sentence_states_what_to_check(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ballast_vllm.serve.current_platform", UnspecifiedPlatform())
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    config = WorkerConfig.model_validate({"model": {"uri": str(tiny_model)}, "engine": {"backend": "vllm"}})
    sentence = r"vLLM found no GPU.* set template.runtimeClassName to nvidia"

    with pytest.raises(WorkerError, match=sentence):
        prepared(config, log_level="info", log_format="json")
    with pytest.raises(NotServed, match=sentence):
        start_replica(config)


LEVELS = {
    "of the command line": (None, "WARNING"),
    "of the pod": ("debug", "DEBUG"),
    "empty": ("", "WARNING"),
    "not known": ("trace", "WARNING"),
}


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("case", LEVELS)
def test_the_level_of_the_logs_is_that_of_the_pod_if_it_has_one(
    case: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given, level = LEVELS[case]
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    if given is not None:
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", given)
    found = prepared(
        WorkerConfig.model_validate(config_of(tiny_model, slots=2)), log_level="warning", log_format="json"
    )

    assert os.environ["VLLM_LOGGING_LEVEL"] == found.logging_config.log_level == level
    assert ("level of the logs not known" in caplog.text) == (case == "not known")


STEPS = {
    "more than four chunks and the decodes": ("--max-num-batched-tokens=2057", True),
    "no more": ("--max-num-batched-tokens=2056", False),
    "the default of vLLM": ("--enforce-eager", False),
}


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("case", STEPS)
def test_a_step_that_the_chunk_keeps_smaller_is_in_the_log(
    case: str, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    argument, is_logged = STEPS[case]
    config = config_of(tiny_model, slots=8, engine={"backend": "vllm", "vllm": {"args": [argument]}})
    with caplog.at_level("WARNING", logger="ballast_vllm.serve"):
        prepared(WorkerConfig.model_validate(config), log_level="info", log_format="json")

    found = [each for each in caplog.messages if each.startswith("steps stay smaller than --max-num-batched-tokens")]
    assert len(found) == is_logged


def start_replica(config: WorkerConfig) -> None:
    async def start() -> None:
        async with open_app(config, Path("worker.yaml")):
            pass

    asyncio.run(start())


@pytest.fixture
def no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """EngineCore does not start: its process logs why, and vLLM raises another error in this one."""
    core = (
        "import logging, os\n"
        "from logging.config import dictConfig\n"
        "own = {'class': 'logging.StreamHandler', 'stream': os.environ['VLLM_LOGGING_STREAM']}\n"
        "dictConfig({'version': 1, 'handlers': {'own': own}, 'root': {'handlers': ['own']}})\n"
        "try:\n"
        "    raise MemoryError('GPU 0 is full')\n"
        "except MemoryError:\n"
        "    logging.exception('EngineCore failed to start.')\n"
    )

    @contextlib.asynccontextmanager
    async def ends(_: object) -> AsyncIterator[None]:
        await (await asyncio.create_subprocess_exec(sys.executable, "-c", core)).wait()
        raise RuntimeError("See root cause above.")
        yield

    monkeypatch.setattr("vllm.entrypoints.launchers.api_server.entry.build_async_engine_client", ends)


@pytest.mark.usefixtures("environment", "no_core")
def test_a_replica_states_why_engine_core_does_not_start(tiny_model: Path) -> None:
    config = WorkerConfig.model_validate(config_of(tiny_model, slots=2))

    with pytest.raises(NotServed, match=r"^vLLM did not start: MemoryError: GPU 0 is full$"):
        start_replica(config)


@pytest.mark.usefixtures("environment", "sigterm")
def test_the_last_line_before_a_start_is_cut_at_bytes(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "worker.yaml"
    config.write_text(json.dumps(config_of(tiny_model, slots=2)))

    assert main(["--config", str(config), "--node-rank=1", f"--master={'é' * 3000}"]) == BAD_ARGUMENTS
    assert 1500 < len(capsys.readouterr().err.splitlines()[-1].encode()) <= len("ballast-vllm: ") + 1500


def test_a_setting_that_ballast_does_not_support_is_refused_before_anything_is_loaded(tiny_model: Path) -> None:
    arguments = parsed(own(tiny_model), [])
    arguments.watermark = 0.1

    with pytest.raises(UnsupportedVllm, match="watermark is set"):
        check(arguments)


def test_on_a_cpu_a_place_for_adapters_stays_empty(tiny_model: Path, adapter: Path) -> None:
    arguments = own(tiny_model, model={"adapters": [{"name": "sql", "uri": f"file://{adapter}"}]})

    check(parsed(arguments, ["--max-loras=2"]))
    with pytest.raises(BadArguments, match=r"sets --max-loras=1. On a CPU it must be above the number of adapters, 1"):
        check(parsed(arguments, ["--max-loras=1"]))


def test_the_nodes_of_a_model_have_the_same_arguments_but_for_their_rank(tiny_model: Path) -> None:
    sections = {"model": {"uri": str(tiny_model)}, "engine": {"backend": "vllm"}}
    config = WorkerConfig.model_validate(sections | {"runtime": {"nodes": 2, "tensorParallel": 4}})

    first, second = (vars(parsed(serve_arguments(config, NodeRank(rank, "10.0.0.1", 29500)), [])) for rank in (0, 1))

    wanted = {"nnodes": 2, "master_addr": "10.0.0.1", "master_port": 29500, "tensor_parallel_size": 4}
    assert {name: first[name] for name in wanted} == wanted
    assert first["distributed_executor_backend"] == "mp"
    different = {name: second[name] for name in first if first[name] != second[name]}
    assert different == {"node_rank": 1, "headless": True}


def test_a_model_over_several_nodes_needs_ray(tiny_model: Path) -> None:
    with pytest.raises(NotServed, match="needs a replica of Ray Serve"):
        own(tiny_model, runtime={"nodes": 2, "tensorParallel": 4})
