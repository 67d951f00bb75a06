"""Members of vLLM's classes and modules, read from its source: it need not be installed."""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeGuard

FILES = {
    "AsyncEngineArgs": "engine/arg_utils.py",
    "AsyncLLM": "v1/engine/async_llm.py",
    "AsyncMPClient": "v1/engine/core_client.py",
    "AsyncScheduler": "v1/core/sched/async_scheduler.py",
    "BaseFrontendArgs": "entrypoints/launchers/cli_args.py",
    "BaseModelPath": "entrypoints/openai/models/protocol.py",
    "BaseRenderer": "renderers/base.py",
    "BeamSearchOnlineMixin": "entrypoints/generate/beam_search/online.py",
    "BeamSearchParams": "sampling_params.py",
    "BlockPool": "v1/core/block_pool.py",
    "CacheConfig": "config/cache.py",
    "ChatParams": "renderers/params.py",
    "ChunkedLocalAttentionSpec": "v1/kv_cache_interface.py",
    "DeviceConfig": "config/device.py",
    "EncoderCacheManager": "v1/core/encoder_cache_manager.py",
    "EngineArgs": "engine/arg_utils.py",
    "EngineCore": "v1/engine/core.py",
    "EngineCoreOutput": "v1/engine/__init__.py",
    "EngineCoreRequest": "v1/engine/__init__.py",
    "FinishReason": "v1/engine/__init__.py",
    "FrontendArgs": "entrypoints/launchers/cli_args.py",
    "FullAttentionSpec": "v1/kv_cache_interface.py",
    "GuidanceBackend": "v1/structured_output/backend_guidance.py",
    "GuidanceGrammar": "v1/structured_output/backend_guidance.py",
    "ImageMediaIO": "multimodal/media/image.py",
    "InprocClient": "v1/engine/core_client.py",
    "InputProcessor": "v1/engine/input_processor.py",
    "KVCacheBlock": "v1/core/kv_cache_utils.py",
    "KVCacheBlocks": "v1/core/kv_cache_manager.py",
    "KVCacheCoordinator": "v1/core/kv_cache_coordinator.py",
    "KVCacheManager": "v1/core/kv_cache_manager.py",
    "LLMEngine": "v1/engine/llm_engine.py",
    "LoRAConfig": "config/lora.py",
    "LoRARequest": "lora/request.py",
    "LoggingConfig": "config/logging.py",
    "MediaConnector": "multimodal/media/connector.py",
    "ModelConfig": "config/model.py",
    "MsgpackEncoder": "v1/serial_utils.py",
    "OpenAIServingModels": "entrypoints/openai/models/serving.py",
    "OutputProcessor": "v1/engine/output_processor.py",
    "ParallelConfig": "config/parallel.py",
    "PauseState": "v1/core/sched/interface.py",
    "PoolingParams": "pooling_params.py",
    "PrefillStats": "v1/metrics/stats.py",
    "RepetitionDetectionParams": "sampling_params.py",
    "Request": "v1/request.py",
    "RequestQueue": "v1/core/sched/request_queue.py",
    "RequestStatus": "v1/request.py",
    "SamplingParams": "sampling_params.py",
    "Scheduler": "v1/core/sched/scheduler.py",
    "SchedulerConfig": "config/scheduler.py",
    "SchedulerOutput": "v1/core/sched/output.py",
    "ServeSubcommand": "entrypoints/cli/serve.py",
    "ServingGenerativeScoring": "entrypoints/generate/generative_scoring/serving.py",
    "SingleTypeKVCacheManager": "v1/core/single_type_kv_cache_manager.py",
    "SlidingWindowSpec": "v1/kv_cache_interface.py",
    "StructuredOutputManager": "v1/structured_output/__init__.py",
    "StructuredOutputsConfig": "config/structured_outputs.py",
    "StructuredOutputsParams": "sampling_params.py",
    "UsageContext": "usage/usage_lib.py",
    "VideoLoader": "multimodal/video.py",
    "VideoMediaIO": "multimodal/media/video.py",
    "VllmConfig": "config/vllm.py",
    "XgrammarBackend": "v1/structured_output/backend_xgrammar.py",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def root() -> Path:
    """Return the folder of vLLM's source: `VLLM_SOURCE`, or the installed package."""
    if source := os.environ.get("VLLM_SOURCE"):
        return Path(source)
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@cache
def tree(file: str) -> ast.Module:
    assert (root() / file).exists(), f"vLLM has no {file}"
    return ast.parse((root() / file).read_text())


@cache
def class_of(name: str) -> ast.ClassDef:
    found = [node for node in tree(FILES[name]).body if isinstance(node, ast.ClassDef) and node.name == name]
    assert found, f"{FILES[name]} has no class {name}"
    return found[0]


def method(class_name: str, name: str) -> Function:
    return _named(class_of(class_name), name)


def parameters(class_name: str, name: str) -> list[str]:
    return _parameters(method(class_name, name))


def function(file: str, name: str) -> Function:
    return _named(tree(file), name)


def function_parameters(file: str, name: str) -> list[str]:
    return _parameters(function(file, name))


def _named(place: ast.Module | ast.ClassDef, name: str) -> Function:
    found = [node for node in place.body if isinstance(node, Function) and node.name == name]
    assert found, f"there is no {name}"
    return found[0]


def _parameters(node: Function) -> list[str]:
    return [argument.arg for argument in node.args.args]


def members(name: str) -> set[str]:
    """Return methods, properties, class attributes, and what any method assigns to `self`.

    A variable inside a method is none, and neither is what only a base class has.
    """
    found = set()
    for node in class_of(name).body:
        if isinstance(node, Function):
            found.add(node.name)
            found |= {
                target.attr
                for target in _targets(node)
                if isinstance(target, ast.Attribute)
                and isinstance(target.value, ast.Name)
                and target.value.id == "self"
            }
        else:
            found |= {target.id for target in _targets(node) if isinstance(target, ast.Name)}
    return found


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """Yield each target of the assignments in a node."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assign):
            for target in inner.targets:
                yield from target.elts if isinstance(target, ast.Tuple) else (target,)
        elif isinstance(inner, ast.AnnAssign):
            yield inner.target


def names(module: str) -> set[str]:
    """Return what an import from a module may name."""
    place = Path(*module.split(".")[1:])
    is_package = (root() / place).is_dir()
    found = {path.stem for path in (root() / place).iterdir()} if is_package else set()
    body = tree(str(place / "__init__.py" if is_package else place.with_suffix(".py"))).body
    for node in [*body, *(inner for outer in body if isinstance(outer, ast.If | ast.Try) for inner in outer.body)]:
        if isinstance(node, ast.ClassDef | Function):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        else:
            found |= {target.id for target in _targets(node) if isinstance(target, ast.Name)}
    if "__getattr__" in found:  # it makes some names at their first use
        found |= {node.value for outer in body for node in ast.walk(outer) if _is_word(node)}
    return found


def _is_word(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier()


def state_names(file: str) -> set[str]:
    """Return the names that a file sets in the state of the app."""
    return {
        target.attr
        for target in _targets(tree(file))
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) in {"state", "app.state"}
    }


def type_of(class_name: str, field: str) -> str:
    """Return the annotation of a field."""
    return next(
        ast.unparse(node.annotation)
        for node in class_of(class_name).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == field
    )


def text(class_name: str, name: str) -> str:
    """Return the code of a method, without comments and with uniform spaces."""
    return ast.unparse(method(class_name, name))
