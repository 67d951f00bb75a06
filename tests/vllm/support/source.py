"""Members of vLLM's classes, read from its source: it need not be installed."""

from __future__ import annotations

import ast
import importlib.util
import os
from functools import cache
from pathlib import Path

FILES = {
    "AsyncScheduler": "v1/core/sched/async_scheduler.py",
    "BlockPool": "v1/core/block_pool.py",
    "EngineCore": "v1/engine/core.py",
    "KVCacheBlock": "v1/core/kv_cache_utils.py",
    "KVCacheBlocks": "v1/core/kv_cache_manager.py",
    "KVCacheCoordinator": "v1/core/kv_cache_coordinator.py",
    "KVCacheManager": "v1/core/kv_cache_manager.py",
    "PauseState": "v1/core/sched/interface.py",
    "Request": "v1/request.py",
    "RequestQueue": "v1/core/sched/request_queue.py",
    "Scheduler": "v1/core/sched/scheduler.py",
    "SingleTypeKVCacheManager": "v1/core/single_type_kv_cache_manager.py",
}


def root() -> Path:
    """Return the folder of vLLM's source: `VLLM_SOURCE`, or the installed package."""
    if source := os.environ.get("VLLM_SOURCE"):
        return Path(source)
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@cache
def class_of(name: str) -> ast.ClassDef:
    tree = ast.parse((root() / FILES[name]).read_text())
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def method(class_name: str, name: str) -> ast.FunctionDef:
    return next(n for n in class_of(class_name).body if isinstance(n, ast.FunctionDef) and n.name == name)


def parameters(class_name: str, name: str) -> list[str]:
    return [argument.arg for argument in method(class_name, name).args.args]


def members(name: str) -> set[str]:
    """Return methods, properties, class attributes, and what any method assigns to `self`."""
    found = set()
    for node in ast.walk(class_of(name)):
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name):
                found.add(target.id)
            elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                found.add(target.attr)
    return found


def text(class_name: str, name: str) -> str:
    """Return the code of a method, without comments and with uniform spaces."""
    return ast.unparse(method(class_name, name))
