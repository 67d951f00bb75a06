"""vLLM's client of EngineCore in the API server. Only this module uses the client's members that are not documented.

`EngineTap` replaces methods of the client object and of its parts. One adds the place in the policy to each request
on its way to EngineCore. One sees each output on its way back. One checks the waiting queue for calls with several
requests. One keeps the names of images apart by tenant, on vLLM's threads, which therefore get the context of a call,
and do online work first. Three refuse what would hold up the other requests. Two refuse chats that a template could
write as gigabytes of text. Two have work on threads that vLLM has on the event loop, and that may take seconds: the
check of structured output, and the tokens of scores. No class of vLLM is changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from functools import cached_property, partial
from typing import Any

from ballast_log import Log
from ballast_openai.chat_limits import MOST_WRITTEN, SPECIAL_TOKENS
from ballast_policy.request import RequestClass
from ballast_vllm.calls import CALL, Call, EngineRequest, can_continue
from ballast_vllm.costs import Asked, excess, excess_of_chat
from ballast_vllm.daemon_threads import DaemonThreads
from ballast_vllm.online_first import OnlineFirst
from ballast_vllm.requests import KEY
from ballast_worker.errors import NotServed, Refused

log = Log(__name__)

DECIDING = ("model", "revision", "dtype", "quantization", "tokenizer", "tokenizer_revision", "hf_overrides",
            "generation_config", "override_generation_config")  # fmt: skip
"""Fields of vLLM's ModelConfig that decide the tokens of an answer."""
PROMPT_LOGPROBS = (
    "This server returns no logprobs of a prompt, because vLLM 0.32 cannot compute them on a CPU with LoRA adapters. "
    "Leave out prompt_logprobs, and echo with logprobs."
)
TOO_LONG = "A text has {} characters. The context of the model holds at most {}."
OVERFLOW = "A number of the request is too large: the parameters of a request hold integers below 2^64."
TOKEN_BYTES = 5
"""A token of a large vocabulary in a message to EngineCore."""
FORMAT_THREADS = 4
"""Structured outputs that are checked at a time."""
OUTSIDE = "--scheduler-cls ballast_vllm.scheduler.BallastScheduler"


class EngineDead(Exception):
    """EngineCore does not answer any more."""


class EngineTap:
    """The requests in EngineCore, and the utility calls to it. It belongs to the event loop of the API server."""

    def __init__(self, engine: Any, now: Any) -> None:
        self.live: dict[str, EngineRequest] = {}
        """Requests in EngineCore, by vLLM's id."""
        self.num_live = dict.fromkeys(RequestClass, 0)
        self.num_begun = dict.fromkeys(RequestClass, 0)
        """Those of them that have an output."""
        self.num_entering = dict.fromkeys(RequestClass, 0)
        """Calls of which EngineCore has no request yet. A call that counts once stays until its first output."""
        self.num_unanswered = dict.fromkeys(RequestClass, 0)
        """Requests of other calls in EngineCore without an output. Items are left out."""
        self.by_tenant: dict[RequestClass, dict[str, int]] = {c: {} for c in RequestClass}
        """Those of both numbers by tenant, without tenants that have none."""
        self.num_answered = dict.fromkeys(RequestClass, 0)
        """Calls that count once, and other requests, that had an output so far, with those that ended."""
        self.num_online = 0
        """Online calls of which EngineCore got a request so far."""
        self.held_up: frozenset[str] = frozenset()
        """The ids of the requests that are held up: see `EngineRequest.is_held_up`."""
        self.isolates_tenants = False
        """Whether tenants share no blocks of the prefix cache."""
        self.check_queue: Callable[[Call, int], None] = lambda _call, _number: None
        """Called before a call makes this number of further requests, or of first ones above 1. It raises to refuse."""
        self._engine = engine
        self._now = now
        core, outputs = engine.engine_core, engine.output_processor
        self._add, self._process = core.add_request_async, outputs.process_outputs
        core.add_request_async = self._add_request
        outputs.process_outputs = self._process_outputs
        self._check, engine.check_admission = engine.check_admission, self._check_admission
        processor = engine.input_processor
        # Without its configuration, vLLM does not check structured output.
        self._formats, processor.structured_outputs_config = processor.structured_outputs_config, None
        self._format_threads = DaemonThreads(FORMAT_THREADS, "formats")
        self._start_request, engine.add_request = engine.add_request, self._start_checked
        renderer = engine.renderer
        self._name_media, renderer._process_mm_uuids = renderer._process_mm_uuids, self._name_own_media  # noqa: SLF001
        threads: Any
        for threads in (renderer._executor, renderer._mm_executor, self._format_threads):  # noqa: SLF001
            threads.submit = OnlineFirst(threads.submit, now)
        self._special_tokens = SPECIAL_TOKENS | set(getattr(renderer.tokenizer, "special_tokens_map", ()))
        self._write, renderer.render_messages = renderer.render_messages, self._write_checked
        self._write_async, renderer.render_messages_async = renderer.render_messages_async, self._write_checked_async

    # The configuration of vLLM

    @property
    def is_encoder(self) -> bool:
        """Whether the model returns vectors or scores, and generates no text."""
        return bool(self._engine.model_config.runner_type == "pooling")

    @property
    def device(self) -> str:
        """The kind of device that computes."""
        return str(self._engine.vllm_config.device_config.device_type)

    @cached_property
    def _has_tables(self) -> bool:
        """Whether the model runner has tables of fixed sizes for the parameters of requests."""
        return bool(self._engine.vllm_config.use_v2_model_runner)

    @property
    def identity(self) -> tuple[str, ...]:
        """What decides the tokens of an answer, the name of the model first."""
        model, cache = self._engine.model_config, self._engine.vllm_config.cache_config
        return (*(str(getattr(model, name)) for name in DECIDING), str(cache.cache_dtype))

    @property
    def most_written(self) -> int:
        """The most characters that a chat template may write."""
        longest = getattr(self._engine.renderer.tokenizer, "max_chars_per_token", 0)
        return max(MOST_WRITTEN, longest * int(self._engine.model_config.max_model_len))

    @property
    def num_servers(self) -> int:
        """API server processes of this engine."""
        return int(self._engine.vllm_config.parallel_config._api_process_count)  # noqa: SLF001

    @property
    def is_dead(self) -> bool:
        """Whether EngineCore ended."""
        return bool(self._engine.errored)

    # Utility calls

    async def stats(self, since: int) -> Mapping[str, Any]:
        """Return the figures of the scheduler.

        Raises:
            EngineDead: EngineCore ended.
            NotServed: vLLM runs with another scheduler.
        """
        found: Mapping[str, Any] = await self._call("ballast_stats", since)
        return found

    def note_held_up(self, request_ids: Collection[str]) -> bool:
        """Note which requests are held up now. Return whether they are others than before."""
        before, self.held_up = self.held_up, frozenset(request_ids)
        for request_id in before ^ self.held_up:
            if (record := self.live.get(request_id)) is not None:
                record.is_held_up = request_id in self.held_up
        return before != self.held_up

    async def configure(self, message: Mapping[str, Any]) -> None:
        """Change the policy configuration."""
        await self._call("ballast_configure", message)

    async def _call(self, method: str, argument: object) -> Any:
        try:
            return await self._engine.engine_core.call_utility_async(method, argument)
        except Exception as error:
            if self.is_dead:
                raise EngineDead from error
            raise NotServed(f"vLLM does not run Ballast's scheduler ({error}): start it with {OUTSIDE}") from error

    # Requests

    def enter(self, call: Call) -> None:
        """Count a call as waiting from now on: its requests reach EngineCore only after vLLM read its body."""
        call.is_entering = True
        self.num_entering[call.request_class] += 1
        self._count(call, 1)

    def _entered(self, call: Call) -> None:
        self.num_entering[call.request_class] -= call.is_entering
        self._count(call, -call.is_entering)
        call.is_entering = False

    def _count(self, call: Call, number: int) -> None:
        """Change the number of requests that wait for the tenant of a call."""
        tenant, counts = call.caller.tenant, self.by_tenant[call.request_class]
        counts[tenant] = counts.get(tenant, 0) + number
        if not counts[tenant]:
            del counts[tenant]

    def end(self, call: Call) -> None:
        """Forget the requests of a call that vLLM forgot."""
        self._entered(call)
        for request in call.requests:
            if not self._engine.output_processor.has_request(request.request_id):
                self._remove(request.request_id)

    def sweep(self) -> None:
        """Forget requests that vLLM aborted after their call ended."""
        known = self._engine.output_processor
        for request_id in [found for found in self.live if not known.has_request(found)]:
            self._remove(request_id)

    def _check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        self._check(n, request_id)
        call = CALL.get()
        if call is None or call.is_item or call.num_searched:
            return
        if n > 1 or call.is_waited_for:
            self.check_queue(call, n)

    def _name_own_media(self, data: Any, items: Any, names: Mapping[str, Sequence[str | None]], request_id: str) -> Any:
        """Put the tenant in front of each name (`uuid`) that the client gave an image or other media.

        If vLLM has content under a name, it does not read what the client sends.
        """
        call = CALL.get()
        if call is not None:
            tenant = call.caller.tenant
            names = {kind: [None if name is None else f"{tenant}\n{name}" for name in of] for kind, of in names.items()}
        return self._name_media(data, items, names, request_id)

    def _write_checked(self, messages: Any, params: Any) -> Any:
        self._check_chat(messages, params)
        return self._write(messages, params)

    async def _write_checked_async(self, messages: Any, params: Any) -> Any:
        self._check_chat(messages, params)
        return await self._write_async(messages, params)

    def _check_chat(self, messages: Any, params: Any) -> None:
        """Refuse a chat before its template writes it. The tools and the documents are among the template's options."""
        if (found := excess_of_chat(messages, params.chat_template_kwargs, self._special_tokens)) is not None:
            raise _invalid(found)

    async def _start_checked(self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        """Check the cost and the structured output of a request, and let vLLM add the request.

        vLLM has worked off the media of the request, so no other call waits for the check.
        """
        if (call := CALL.get()) is not None:
            call.leave_media()
        if (found := excess(params, has_tables=self._has_tables)) is not None:
            raise _invalid(found[1], found[0])
        self._check_asked(prompt, params)
        if getattr(params, "structured_outputs", None) is not None:
            check = partial(self._check_format, params)
            await asyncio.get_running_loop().run_in_executor(self._format_threads, check)
        return await self._start_request(request_id, prompt, params, *args, **kwargs)

    def _check_asked(self, prompt: Any, params: Any) -> None:
        """Refuse a request if its call asks for too much with it."""
        asked, model, call = _asked(), self._engine.model_config, CALL.get()
        num_prompt, num_choices = _num_tokens(prompt), getattr(params, "n", 1)
        found = asked.excess(
            params,
            num_prompt,
            context=model.max_model_len,
            vocabulary=model.get_vocab_size(),
            is_begun=call is not None and call.timing.first_at is not None,
        )
        if found is not None:
            raise _invalid(found[1], found[0])
        if asked.num_requests or num_choices > 1:  # the message of the only request is as large as the body
            from ballast_vllm.internals import encoded_bytes  # noqa: PLC0415 - tests of this module need no vLLM

            copies = num_choices * encoded_bytes(params) + (num_choices - 1) * TOKEN_BYTES * num_prompt
            if (refusal := asked.excess_of_copies(copies)) is not None:
                raise _invalid(refusal)
        asked.num_requests += 1

    def limit_searches(self, serving: Any) -> None:
        """Let a part of vLLM's app refuse a beam search that would keep too much, before it begins."""
        search = serving.beam_search

        def beam_search(prompt: Any, request_id: str, params: Any, **options: Any) -> Any:
            found = _asked().excess_of_search(params.beam_width, params.max_tokens, _num_tokens(prompt))
            if found is not None:
                raise _invalid(found, "max_tokens")
            return search(prompt=prompt, request_id=request_id, params=params, **options)

        serving.beam_search = beam_search

    def build_scores_on_threads(self, scoring: Any) -> None:
        """Let vLLM's `/generative_scoring` tokenize on the threads of its renderer, and only texts that can fit."""
        build, threads = scoring._build_prompts, self._engine.renderer._executor  # noqa: SLF001

        async def build_prompts(request: Any, tokenizer: Any, max_model_len: int) -> Any:
            most = max_model_len * tokenizer.max_chars_per_token
            longest = max((len(text) for text in (request.query, *request.items) if isinstance(text, str)), default=0)
            if longest > most:
                raise _invalid(TOO_LONG.format(longest, most))
            work = build(request, tokenizer, max_model_len)  # a coroutine that awaits nothing
            return await asyncio.get_running_loop().run_in_executor(threads, asyncio.run, work)

        scoring._build_prompts = build_prompts  # noqa: SLF001

    def _check_format(self, params: Any) -> None:
        from ballast_vllm.internals import check_format  # noqa: PLC0415 - tests of this module need no vLLM

        check_format(params, self._engine.model_config, self._formats, self._engine.renderer.tokenizer)

    async def _add_request(self, request: Any) -> None:
        await self._refuse_prompt_logprobs(request)
        if (found := excess(request.sampling_params, has_tables=self._has_tables)) is not None:
            await self._forget(request)
            raise _invalid(found[1], found[0])
        call = CALL.get()
        if call is not None:
            call.leave_media()
            request = self._placed(request, call)
        try:
            await self._add(request)
        except BaseException as error:
            await self._forget(request)
            if isinstance(error, OverflowError):
                raise _invalid(OVERFLOW) from error
            raise

    async def _refuse_prompt_logprobs(self, request: Any) -> None:
        """Refuse logprobs of a prompt where they end EngineCore: the adapters of a CPU expect sampled tokens only."""
        params, engine = request.sampling_params, self._engine
        is_asked = params is not None and params.prompt_logprobs is not None
        if not (is_asked and self.device == "cpu" and engine.vllm_config.lora_config):
            return
        await self._forget(request)
        raise _invalid(PROMPT_LOGPROBS, "prompt_logprobs")

    async def _forget(self, request: Any) -> None:
        """Let vLLM forget a request that EngineCore did not get. It forgets others after their last output."""
        await self._engine.abort(request.request_id, internal=True)

    def _placed(self, request: Any, call: Call) -> Any:
        """Return the request with its place in the policy, and after the tokens of an earlier attempt."""
        record = EngineRequest(
            request.request_id, call, len(request.prompt_token_ids or ()), call.is_item and can_continue(request)
        )
        place = call.place(request.priority, num_computed=call.take_computed(record.num_prompt)).message()
        if request.priority:
            request.priority = 0
        if self.isolates_tenants:
            request.cache_salt = f"{place['tenant']}\n{request.cache_salt or ''}"
        if request.pooling_params is not None:
            params = request.pooling_params
            params.extra_kwargs = {**(params.extra_kwargs or {}), KEY: place}
        else:
            params = request.sampling_params
            params.extra_args = {**(params.extra_args or {}), KEY: place}
            generated = () if call.requests else call.generated  # that of the first turn of a tool loop
            if generated and record.can_continue and params.max_tokens > len(generated):
                # vLLM's API server still has the request as it was, and gets the earlier tokens with the first output.
                request = copy(request)
                request.sampling_params = params = copy(params)
                request.prompt_token_ids = [*request.prompt_token_ids, *generated]
                params.max_tokens -= len(generated)
                record.replay = generated
        record.num_logprobs = call.asked.kept_per_token(
            request.sampling_params, self._engine.model_config.get_vocab_size()
        )
        self.live[request.request_id] = record
        self.num_online += not call.requests and call.request_class is RequestClass.ONLINE
        if not call.counts_once:
            self._entered(call)
        self.num_live[call.request_class] += 1
        self.num_unanswered[call.request_class] += record.is_counted
        self._count(call, record.is_counted)
        call.requests.append(record)
        return request

    def _process_outputs(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        now, live = self._now(), self.live
        seen = [(output, live[output.request_id]) for output in outputs if output.request_id in live]
        for output, record in seen:
            self._note(output, record, now)
        result = self._process(outputs, *args, **kwargs)
        known = self._engine.output_processor
        for output, record in seen:
            if not known.has_request(output.request_id):
                reason = str(output.finish_reason)
                record.is_cut = reason == "length"
                record.is_aborted = reason == "abort"
                record.is_failed = reason == "error"
                record.is_over = True
                self._remove(output.request_id)
        return result

    def _note(self, output: Any, record: EngineRequest, now: float) -> None:
        record.call.last_at = record.last_at = now
        computed = output.new_token_ids
        if not record.is_begun:
            self._begin(output, record, now)
        record.num_output += len(computed)
        if record.num_logprobs:
            self._count_logprobs(record.call, record.num_logprobs * len(computed))
        if record.can_continue:
            record.token_ids += computed

    def _count_logprobs(self, call: Call, number: int) -> None:
        """Count the logprobs that vLLM keeps for the answer of a call. End the call if they are too many."""
        found = call.asked.excess_of_generated(number)
        if found is not None and call.refused is None:
            call.refused = Refused(400, found, param="logprobs")
            call.hang_up()

    def _begin(self, output: Any, record: EngineRequest, now: float) -> None:
        call = record.call
        if output.new_token_ids and record.replay:
            output.new_token_ids = [*record.replay, *output.new_token_ids]
        prefill = output.prefill_stats
        if prefill is not None:
            prefill.num_cached_tokens = min(prefill.num_cached_tokens, record.num_prompt)
            record.num_cached = prefill.num_cached_tokens
        if str(output.finish_reason) in {"abort", "error"}:
            return
        record.first_at = now
        self.num_begun[call.request_class] += 1
        self.num_unanswered[call.request_class] -= record.is_counted
        self._count(call, -record.is_counted)
        is_first = call.timing.first_at is None
        self.num_answered[call.request_class] += is_first or not call.counts_once
        if is_first:
            self._entered(call)
            call.timing.first_at = now
            if call.on_begin is not None:
                call.on_begin()

    def _remove(self, request_id: str) -> None:
        record = self.live.pop(request_id, None)
        if record is not None:
            self.num_live[record.call.request_class] -= 1
            self.num_begun[record.call.request_class] -= record.is_begun
            is_unanswered = record.is_counted and not record.is_begun
            self.num_unanswered[record.call.request_class] -= is_unanswered
            self._count(record.call, -is_unanswered)


def _asked() -> Asked:
    """Return what the call has asked for so far."""
    call = CALL.get()
    return Asked() if call is None else call.asked


def _num_tokens(prompt: Any) -> int:
    """Return the tokens of a prompt as vLLM's renderer makes it; those of the decoder if it has an encoder."""
    if not isinstance(prompt, Mapping):
        return 0  # not what a renderer makes
    decoder: Mapping[str, Any] = prompt.get("decoder_prompt", prompt)
    found = decoder.get("prompt_token_ids", decoder.get("prompt_embeds"))
    return 0 if found is None else len(found)


def _invalid(message: str, parameter: str | None = None) -> Exception:
    from ballast_vllm.internals import invalid_request  # noqa: PLC0415 - tests of this module need no vLLM

    return invalid_request(message, parameter)
