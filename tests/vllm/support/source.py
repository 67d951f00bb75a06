"""Members of vLLM's classes and modules, read from its source: it need not be installed."""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeGuard

CLASSES = {
    "config/cache.py": "CacheConfig",
    "config/device.py": "DeviceConfig",
    "config/logging.py": "LoggingConfig",
    "config/lora.py": "LoRAConfig",
    "config/model.py": "ModelConfig",
    "config/parallel.py": "ParallelConfig",
    "config/scheduler.py": "SchedulerConfig",
    "config/structured_outputs.py": "StructuredOutputsConfig",
    "config/vllm.py": "VllmConfig",
    "engine/arg_utils.py": "AsyncEngineArgs EngineArgs",
    "entrypoints/cli/serve.py": "ServeSubcommand",
    "entrypoints/generate/beam_search/online.py": "BeamSearchOnlineMixin",
    "entrypoints/generate/generative_scoring/serving.py": "ServingGenerativeScoring",
    "entrypoints/launchers/cli_args.py": "BaseFrontendArgs FrontendArgs",
    "entrypoints/openai/models/protocol.py": "BaseModelPath",
    "entrypoints/openai/models/serving.py": "OpenAIServingModels",
    "lora/request.py": "LoRARequest",
    "multimodal/media/connector.py": "MediaConnector",
    "multimodal/media/image.py": "ImageMediaIO",
    "multimodal/media/video.py": "VideoMediaIO",
    "multimodal/video.py": "VideoLoader",
    "pooling_params.py": "PoolingParams",
    "renderers/base.py": "BaseRenderer",
    "renderers/params.py": "ChatParams",
    "sampling_params.py": "BeamSearchParams RepetitionDetectionParams SamplingParams StructuredOutputsParams",
    "usage/usage_lib.py": "UsageContext",
    "v1/core/block_pool.py": "BlockPool",
    "v1/core/encoder_cache_manager.py": "EncoderCacheManager",
    "v1/core/kv_cache_coordinator.py": "KVCacheCoordinator",
    "v1/core/kv_cache_manager.py": "KVCacheBlocks KVCacheManager",
    "v1/core/kv_cache_utils.py": "KVCacheBlock",
    "v1/core/sched/async_scheduler.py": "AsyncScheduler",
    "v1/core/sched/interface.py": "PauseState",
    "v1/core/sched/output.py": "SchedulerOutput",
    "v1/core/sched/request_queue.py": "RequestQueue",
    "v1/core/sched/scheduler.py": "Scheduler",
    "v1/core/single_type_kv_cache_manager.py": "SingleTypeKVCacheManager",
    "v1/engine/__init__.py": "EngineCoreOutput EngineCoreRequest FinishReason",
    "v1/engine/async_llm.py": "AsyncLLM",
    "v1/engine/core.py": "EngineCore",
    "v1/engine/core_client.py": "AsyncMPClient InprocClient",
    "v1/engine/input_processor.py": "InputProcessor",
    "v1/engine/llm_engine.py": "LLMEngine",
    "v1/engine/output_processor.py": "OutputProcessor",
    "v1/kv_cache_interface.py": "ChunkedLocalAttentionSpec FullAttentionSpec SlidingWindowSpec",
    "v1/metrics/stats.py": "PrefillStats",
    "v1/request.py": "Request RequestStatus",
    "v1/serial_utils.py": "MsgpackEncoder",
    "v1/structured_output/__init__.py": "StructuredOutputManager",
    "v1/structured_output/backend_guidance.py": "GuidanceBackend GuidanceGrammar",
    "v1/structured_output/backend_xgrammar.py": "XgrammarBackend",
}
FILES = {name: file for file, names in CLASSES.items() for name in names.split()}
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
