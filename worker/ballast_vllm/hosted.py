"""vLLM's app with Ballast in front of it, in a process whose HTTP server is not that of vLLM."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.applications import Starlette

from ballast_api.worker_config import WorkerConfig
from ballast_vllm import core_failure
from ballast_vllm.__main__ import check_installed, prepare_config, stay_offline
from ballast_vllm.arguments import NodeRank
from ballast_vllm.errors import BadArguments
from ballast_vllm.versions import UnsupportedVllm
from ballast_worker.errors import NotServed, WorkerError


@contextlib.asynccontextmanager
async def open_app(config: WorkerConfig, path: Path, node: NodeRank | None = None) -> AsyncIterator[Starlette]:
    """Start EngineCore, and return the app, which starts and stops with its lifespan. At the end, end EngineCore.

    `app.state.ballast` is the `VllmServer` of the app while it runs, and `app.state.ballast_error` states why it did
    not start.

    With `node`, the model spans several nodes. The other nodes run `ballast-vllm --node-rank`.

    Raises:
        NotServed: the message states what vLLM or Ballast refuses, or why EngineCore did not start.
    """
    stay_offline()
    try:
        check_installed()
    except UnsupportedVllm as error:
        raise NotServed(str(error)) from error
    # vLLM's modules move between versions.
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state  # noqa: PLC0415
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client  # noqa: PLC0415
    from vllm.entrypoints.launchers.app import build_app  # noqa: PLC0415

    from ballast_vllm import shared_memory  # noqa: PLC0415
    from ballast_vllm.serve import prepared  # noqa: PLC0415

    if os.environ.get("OMP_NUM_THREADS") == "1":  # Ray sets it so, unless the pod has another value
        del os.environ["OMP_NUM_THREADS"]
    prepare_config(config, path)
    try:
        arguments = prepared(config, log_level="info", log_format="text", node=node)
    except (BadArguments, UnsupportedVllm, WorkerError) as error:
        raise NotServed(str(error)) from error
    arguments.model = arguments.model_tag
    async with contextlib.AsyncExitStack() as stack:
        reason = stack.enter_context(core_failure.noted())
        stack.enter_context(shared_memory.released())
        try:
            client = await stack.enter_async_context(build_async_engine_client(arguments))
        except Exception as error:
            if (found := reason()) is None:
                raise
            raise NotServed(core_failure.NOT_STARTED.format(found)) from error
        tasks = await client.get_supported_tasks()
        app = build_app(arguments, tasks, client.model_config)
        await init_app_state(client, app.state, arguments, tasks)
        yield app
