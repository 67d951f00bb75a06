"""The app and the engine client of a vLLM API server, as far as Ballast's middleware uses them. No model computes.

An engine request waits until the test gives it outputs. An output for a request that ended, or that never came, fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ballast_policy.host import Host
from ballast_policy.request import RUNNING, RequestClass
from ballast_policy.snapshot import PolicyConfig
from ballast_vllm import stats
from ballast_vllm.counters import Counters
from ballast_vllm.served_app import RENDERING

GREEDY = {
    "n": 1, "temperature": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
    "min_tokens": 0, "logprobs": None, "prompt_logprobs": None, "logprob_token_ids": None, "structured_outputs": None,
    "bad_words": None, "thinking_token_budget": None, "repetition_detection": None, "watermarking": None,
    "trace_decode_token_ids": None, "max_tokens": 8, "extra_args": None,
}  # fmt: skip


@dataclass
class Answer:
    """What the client of one engine request gets."""

    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    parts: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)
    """The tokens that a stream did not send yet, and None at the end."""


class FakeEngine:
    """An engine client with EngineCore behind it."""

    def __init__(self, slots: int = 2) -> None:
        self.errored = False
        self.sent: dict[str, Any] = {}
        """Requests as EngineCore got them, by id."""
        self.error: Exception | None = None
        """What the next requests raise on their way to EngineCore."""
        self.aborted: list[str] = []
        """Requests whose client left before their end."""
        self.configured: list[Any] = []
        self.counters = Counters()
        self.held_up: dict[str, Any] = {}
        """Requests that are held up, by id."""
        self.host = Host(PolicyConfig(slots=slots, num_blocks=100, block_tokens=16))
        self.model_config = SimpleNamespace(
            runner_type="generate",
            max_model_len=1024,
            get_vocab_size=lambda: 128_256,
            model="fake",
            revision=None,
            dtype="float32",
            quantization=None,
            tokenizer="fake",
            tokenizer_revision=None,
            hf_overrides={},
            generation_config="auto",
            override_generation_config={},
        )
        self.vllm_config = SimpleNamespace(
            additional_config={},
            parallel_config=SimpleNamespace(_api_process_count=1, world_size=2),
            device_config=SimpleNamespace(device_type="cpu"),
            cache_config=SimpleNamespace(block_size=16, cache_dtype="auto"),
            use_v2_model_runner=True,
        )
        self.engine_core = SimpleNamespace(add_request_async=self._add, call_utility_async=self._call)
        self.renderer = SimpleNamespace(
            tokenizer=None,
            render_messages=None,
            render_messages_async=None,
            _process_mm_uuids=None,
            _executor=SimpleNamespace(submit=None),
            _mm_executor=SimpleNamespace(submit=None),
        )
        self.input_processor = SimpleNamespace(structured_outputs_config=None)
        self.answers: dict[str, Answer] = {}
        self.output_processor = SimpleNamespace(has_request=self.answers.__contains__, process_outputs=self._process)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Admit all, as vLLM does without limits of its own."""

    async def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        """Raise, because the fake has no requests in vLLM's own form."""
        raise NotImplementedError

    async def _add(self, request: Any) -> None:
        assert request.request_id not in self.sent, "an id is used twice"
        if self.error is not None:
            raise self.error
        self.sent[request.request_id] = request

    async def abort(self, request_id: str, *, internal: bool) -> None:
        assert internal
        del self.answers[request_id]

    async def _call(self, method: str, argument: Any) -> Any:
        if method == "ballast_configure":
            self.configured.append(argument)
            return None
        assert method == "ballast_stats", method
        return stats.message(
            self.counters,
            self.host,
            kv_free=100,
            kv_offline=0,
            kv_cached=0,
            num_blocked=dict.fromkeys(self.host.held, 0),
            held_up=self.held_up,
            since=argument,
        )

    def _process(self, outputs: list[Any], *_: Any, **__: Any) -> None:
        for output in outputs:
            answer = self.answers[output.request_id]
            answer.tokens += output.new_token_ids
            for token in output.new_token_ids:
                answer.parts.put_nowait(token)
            if output.finish_reason is not None:
                answer.reason = output.finish_reason
                del self.answers[output.request_id]
                answer.parts.put_nowait(None)
                answer.is_over.set()

    def give(self, request_id: str, *tokens: int, reason: str | None = None) -> None:
        """Let EngineCore compute tokens of a request, and end it with a reason."""
        assert request_id in self.sent, "EngineCore does not have the request"
        output = SimpleNamespace(
            request_id=request_id, new_token_ids=list(tokens), finish_reason=reason, prefill_stats=None
        )
        self.output_processor.process_outputs([output], 0.0, None)

    def report(self, request_class: RequestClass, num_running: int) -> None:
        """Let the scheduler report from now on that requests of a class hold slots."""
        self.host.held[request_class][RUNNING] = num_running

    @asynccontextmanager
    async def _running(self, number: int, body: dict[str, Any]) -> AsyncIterator[Answer]:
        sampling = GREEDY | body.get("sampling", {})
        sampling["num_logprobs"] = sampling["logprobs"]
        sampling["output_kind"] = SimpleNamespace(name="DELTA" if body.get("stream") else "FINAL_ONLY")
        request = SimpleNamespace(
            request_id=f"r{number}", prompt_token_ids=[1, 2, 3], pooling_params=None, prompt_embeds=None,
            sampling_params=SimpleNamespace(**sampling), lora_request=None, resumable=False,
            priority=body.get("priority", 0), cache_salt=body.get("cache_salt"),
        )  # fmt: skip
        answer = self.answers[request.request_id] = Answer()
        self.check_admission(1, request.request_id)
        await self.engine_core.add_request_async(request)
        try:
            yield answer
        finally:
            if self.answers.pop(request.request_id, None) is not None:
                self.aborted.append(request.request_id)

    async def generate(self, number: int, body: dict[str, Any]) -> Answer:
        """Return the answer to a body, as vLLM's routes do."""
        async with self._running(number, body) as answer:
            await answer.is_over.wait()
        return answer

    async def stream(self, number: int, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """Yield the answer to a body token by token, as vLLM's routes do."""
        async with self._running(number, body) as answer:
            while (token := await answer.parts.get()) is not None:
                yield b"%d" % token


class FakeVllm(Starlette):
    """The app. `middleware` sees its requests and its lifespan."""

    def __init__(self, engine: FakeEngine, urls: Sequence[str] = ("/v1/completions",), **arguments: Any) -> None:
        super().__init__(
            routes=[Route("/v1/completions", self._complete, methods=["POST"]), Route("/v1/models", _models)]
        )
        self.state.engine_client = engine
        self.state.vllm_config = engine.vllm_config
        self.state.openai_serving_models = SimpleNamespace(
            base_model_paths=[SimpleNamespace(name="m")], lora_requests={}
        )
        given = {
            "model": "fake",
            "host": None,
            "port": 8000,
            "ssl_keyfile": None,
            "api_key": None,
            "allowed_origins": [],
        }
        given |= {"chat_template": None, **dict.fromkeys(RENDERING)}
        self.state.args = SimpleNamespace(**given | arguments)
        self._engine, self._urls = engine, urls
        self._count = 0

    def openapi(self) -> dict[str, Any]:
        return {"paths": {url: {"post": {}} for url in self._urls}}

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        if body.get("max_tokens") == 0:
            return JSONResponse({"error": {"message": "max_tokens must be at least 1", "code": 400}}, 400)
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        numbers = range(self._count + 1, self._count + 1 + len(prompts))
        self._count += len(prompts)
        if body.get("stream"):
            return StreamingResponse(self._engine.stream(self._count, body))
        work = asyncio.gather(*(self._engine.generate(number, body) for number in numbers))
        gone = asyncio.ensure_future(request.receive())
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not work.done():
            work.cancel()
            return JSONResponse(None)
        answers = work.result()
        tokens = [token for answer in answers for token in answer.tokens]
        usage = {"prompt_tokens": 3 * len(answers), "completion_tokens": len(tokens)}
        return JSONResponse({"tokens": tokens, "reason": answers[0].reason, "usage": usage})


async def _models(_: Request) -> Response:
    return JSONResponse({"data": [{"id": "m"}]})
