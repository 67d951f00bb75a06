"""Requests on their way to EngineCore and outputs on their way back. `test_contract.py` has the members of vLLM."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from small_models import make_tokenizer

from ballast_policy.request import RequestClass
from ballast_vllm.calls import CALL, Call, can_continue
from ballast_vllm.costs import Asked, excess
from ballast_vllm.engine_client import EngineTap
from ballast_worker.openai import Caller
from ballast_worker.requests import RequestTiming

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM use what others deprecated
    from vllm.config import StructuredOutputsConfig
    from vllm.exceptions import VLLMValidationError
    from vllm.lora.request import LoRARequest
    from vllm.renderers import ChatParams
    from vllm.sampling_params import (
        BeamSearchParams,
        RepetitionDetectionParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from vllm.v1.core.sched.utils import check_sequence_repetition
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
    from vllm.v1.metrics.stats import PrefillStats


def make_request(request_id="r", prompt=(1, 2), **params) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=SamplingParams(**({"temperature": 0.0} | params)),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def test_reasons_have_the_names_that_ballast_compares():
    assert {str(FinishReason.LENGTH), str(FinishReason.ABORT)} == {"length", "abort"}


@pytest.mark.parametrize(
    ("more", "expected"),
    [({}, True), ({"lora_request": LoRARequest("a", 1, "/a")}, False), ({"prompt_embeds": torch.zeros(2)}, False),
     ({"resumable": True}, False)],
    ids=["plain", "an adapter", "vectors", "streamed input"],
)  # fmt: skip
def test_a_plain_greedy_request_of_the_model_can_be_continued(more, expected):
    """Another worker may have another adapter under the same name."""
    request = make_request(stop=["z"], max_tokens=9, logit_bias={3: 1.0}, ignore_eos=True)
    for name, value in more.items():
        setattr(request, name, value)

    assert can_continue(request) == expected


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"min_tokens": 3, "max_tokens": 9},
        {"logprobs": 0},
        {"prompt_logprobs": 1},
        {"bad_words": ["a"]},
        {"n": 2, "temperature": 0.5},
    ],
)
def test_a_request_whose_sampling_depends_on_its_answer_is_not_continued(params):
    assert not can_continue(make_request(**params))


END_OF_TEXT = 99
"""A token with which the text of an answer has a stop string. EngineCore does not know it."""


class Processor:
    """vLLM's output processor: it forgets a request that ended."""

    def __init__(self):
        self.known = set()

    def has_request(self, request_id):
        return request_id in self.known

    def process_outputs(self, outputs):
        self.known -= {
            output.request_id
            for output in outputs
            if output.finish_reason is not None or END_OF_TEXT in output.new_token_ids
        }


class Engine:
    """vLLM's client without an EngineCore. It keeps the requests that it gets."""

    def __init__(self):
        self.engine_core, self.renderer, self.output_processor = self, self, Processor()
        self.errored = False
        self.sent = []
        self._executor, self._mm_executor = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.input_processor = SimpleNamespace(structured_outputs_config=StructuredOutputsConfig())
        self.model_config = SimpleNamespace(is_diffusion=False, max_model_len=32_768, get_vocab_size=lambda: 128_256)
        self.vllm_config = SimpleNamespace(use_v2_model_runner=True)
        self.tokenizer = make_tokenizer()

    def check_admission(self, n=1, request_id=None):
        """Admit all, as vLLM does without limits of its own."""

    async def add_request(self, request_id, prompt, params):
        """Note on which thread vLLM goes on."""
        return threading.current_thread()

    async def add_request_async(self, request):
        self.sent.append(request)

    async def abort(self, request_id, *, internal):
        """Forget a request."""
        assert internal
        self.output_processor.known.discard(request_id)

    def _process_mm_uuids(self, data, items, names, request_id):
        return names

    def render_messages(self, messages, params):
        """Return the number of messages that vLLM would render."""
        return len(messages)

    async def render_messages_async(self, messages, params):
        return len(messages)

    def add(self, request, *, n=1):
        """Add a request in the steps of vLLM's `add_request`."""
        self.check_admission(n, request.request_id)
        self.output_processor.known.add(request.request_id)
        asyncio.run(self.engine_core.add_request_async(request))

    def output(self, request_id, *token_ids, reason=None, num_cached=0):
        """Return the cached tokens of the prompt that vLLM reports to the client."""
        prefill = PrefillStats(num_cached_tokens=num_cached)
        made = EngineCoreOutput(request_id, list(token_ids), finish_reason=reason, prefill_stats=prefill)
        self.output_processor.process_outputs([made])
        return prefill.num_cached_tokens


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def tap(engine):
    return EngineTap(engine, time.monotonic)


@pytest.fixture
def begin(request):
    """`begin(**fields)` starts a call, which all requests that follow belong to."""

    def begun(request_class=RequestClass.ONLINE, **fields):
        call = Call(Caller("lab", request_class, 0), RequestTiming(request_class, time.monotonic()), **fields)
        token = CALL.set(call)
        request.addfinalizer(lambda: CALL.reset(token))
        return call

    return begun


@pytest.mark.parametrize(
    ("counts", "checked"),
    [
        pytest.param([1], [], id="one request"),
        pytest.param([1, 1, 1], [1, 1], id="three prompts"),
        pytest.param([4], [4], id="four answers"),
        pytest.param([4, 4], [4, 4], id="two prompts with four answers"),
    ],
)
def test_the_queue_is_checked_for_each_further_request_of_a_call(engine, tap, begin, counts, checked):
    found = []
    tap.check_queue = lambda _, number: found.append(number)
    tap.enter(begin())
    for place, n in enumerate(counts):
        engine.add(make_request(request_id=f"{place}"), n=n)

    assert found == checked


def test_the_queue_is_not_checked_for_items_and_for_a_request_after_the_end_of_another(engine, tap, begin):
    found = []
    tap.check_queue = lambda _, number: found.append(number)
    begin(RequestClass.OFFLINE, is_item=True)
    engine.add(make_request(request_id="a"), n=4)
    begin()
    engine.add(make_request(request_id="b"))
    engine.output("b", 5, reason=FinishReason.STOP)
    engine.add(make_request(request_id="c"))

    assert found == []


def test_only_the_first_request_of_an_item_continues_the_earlier_attempt(engine, tap, begin):
    begin(RequestClass.OFFLINE, is_item=True, generated=(7, 8))
    engine.add(make_request("first", max_tokens=9))
    num_cached = engine.output("first", 9, reason=FinishReason.STOP, num_cached=3)
    engine.add(make_request("after the tool", (1, 2, 7, 8, 9, 3), max_tokens=9))

    assert [request.prompt_token_ids for request in engine.sent] == [[1, 2, 7, 8], [1, 2, 7, 8, 9, 3]]
    assert [request.sampling_params.max_tokens for request in engine.sent] == [7, 9]
    assert num_cached == 2, "the prompt of the client has two tokens"


@pytest.mark.parametrize(
    ("reason", "state", "expected"),
    [
        pytest.param(FinishReason.STOP, "", "stop", id="a whole answer"),
        pytest.param(FinishReason.STOP, "dead", "stop", id="a whole answer before EngineCore ended"),
        pytest.param(FinishReason.LENGTH, "", "length", id="a limit of tokens"),
        pytest.param(FinishReason.STOP, "cut", "aborted", id="a client that left"),
        pytest.param(FinishReason.ERROR, "", "failed", id="a stream that reports an error of EngineCore"),
        pytest.param(FinishReason.ERROR, "cut", "failed", id="a client that left after an error"),
        pytest.param(None, "", "aborted", id="a client that left before the response"),
        pytest.param(None, "dead", "failed", id="a stream that reports the end of EngineCore"),
        pytest.param(None, "cut, dead", "failed", id="a stream that the end of EngineCore cut"),
    ],
)
@pytest.mark.usefixtures("tap")
def test_a_call_ends_as_its_requests_do(engine, begin, reason, state, expected):
    call = begin()
    engine.add(make_request())
    engine.output("r", 5, reason=reason)

    assert call.ending(is_complete="cut" not in state, is_dead="dead" in state) == expected


def test_a_stop_string_ends_a_call(engine, tap, begin):
    call = begin()
    engine.add(make_request())
    engine.output("r", END_OF_TEXT)

    assert tap.live == {}
    assert call.ending(is_complete=True, is_dead=False) == "stop"


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_an_end_without_a_token_is_no_first_token(engine, tap, begin, reason):
    call = begin()
    tap.enter(call)
    engine.add(make_request())
    engine.output("r", reason=reason)
    tap.end(call)

    assert call.timing.first_at is None
    assert tap.num_answered["online"] == tap.num_entering["online"] == tap.num_unanswered["online"] == 0


def test_a_beam_search_is_one_request_of_its_prompt_and_its_longest_answer(engine, tap, begin):
    checked = []
    tap.check_queue = lambda _, number: checked.append(number)
    call = begin(num_searched=1, counts_once=True)
    tap.enter(call)
    for step, num_beams in enumerate((1, 3, 3)):
        beams = [f"{step}-{beam}" for beam in range(num_beams)]
        for beam in beams:
            engine.add(make_request(beam, (1, 2, 3, 4) + (7,) * step, max_tokens=1))
        for beam in beams:
            engine.output(beam, 7, reason=FinishReason.LENGTH)

    assert (checked, call.num_prompt, call.num_output, call.slowest[1]) == ([], 4, 3, 3)
    assert call.slowest[0] == call.last_at - call.timing.first_at
    assert tap.num_answered["online"] == 1
    assert call.ending(is_complete=True, is_dead=False) == "length"


def form(**fields):
    return {"structured_outputs": StructuredOutputsParams(**fields)}


def repetition(least, most, count):
    sizes = {"min_pattern_size": least, "max_pattern_size": most, "min_count": count}
    return {"repetition_detection": RepetitionDetectionParams(**sizes)}


SOON = {"min_tokens": 1}


@pytest.mark.parametrize(
    ("params", "refused"),
    [
        pytest.param(repetition(5, 64, 5), None, id="sizes 5 to 64, 5 times"),
        pytest.param(repetition(8, 128, 3), None, id="sizes 8 to 128, 3 times"),
        pytest.param(repetition(0, 500, 4), None, id="sizes up to 500, 4 times"),
        pytest.param(repetition(1, 513, 2), "repetition", id="size 513"),
        pytest.param(repetition(7, 64, 5), "repetition", id="sizes 7 to 64, 5 times"),
        pytest.param(repetition(16, 1024, 4), "repetition", id="sizes 16 to 1024, 4 times"),
        pytest.param(repetition(8000, 10**30, 2), "repetition", id="sizes without an end"),
        pytest.param(repetition(1, 1, 10**30), "repetition", id="a count"),
        pytest.param({"logit_bias": dict.fromkeys(range(1024), 1.0)}, None, id="1024 biases"),
        pytest.param({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias", id="biases"),
        pytest.param({"allowed_token_ids": [1] * 1025}, "allowed_token_ids", id="allowed tokens"),
        pytest.param(SOON | {"stop_token_ids": list(range(128))}, None, id="128 stop tokens"),
        pytest.param(SOON | {"stop_token_ids": list(range(129))}, "stop_token_ids", id="stop tokens"),
        pytest.param(SOON | {"_all_stop_token_ids": set(range(129))}, "stop_token_ids", id="stop tokens of the model"),
        pytest.param({"stop_token_ids": list(range(1024))}, None, id="1024 stop tokens at once"),
        pytest.param({"stop_token_ids": list(range(1025))}, "stop_token_ids", id="stop tokens at once"),
        pytest.param({"bad_words": ["a" * 9000, "b" * 9000]}, "bad_words", id="characters of bad words"),
        pytest.param({"_bad_words_token_ids": [[1] * 500] * 3}, "bad_words", id="tokens of bad words"),
        pytest.param(form(choice=["a"] * 10_001), "structured_outputs", id="choices"),
        pytest.param(form(grammar="root ::= 'a'" * 9000), "structured_outputs", id="a grammar"),
    ],
)
def test_a_parameter_that_holds_up_or_ends_enginecore_is_refused(engine, tap, begin, params, refused):
    """vLLM computes the parameters with an underscore after the client's request has passed."""
    begin()
    request = make_request(**{name: value for name, value in params.items() if not name.startswith("_")})
    found = []

    def add(start):
        try:
            asyncio.run(start(request.request_id, None, request.sampling_params))
        except VLLMValidationError as error:
            found.append(str(error))

    add(engine.add_request)
    is_known_at_once = bool(found)
    for name, value in params.items():
        setattr(request.sampling_params, name, value)
    add(lambda *_: asyncio.to_thread(engine.add, request))

    assert [refused in message and "asks for more than" in message for message in found] == (
        [] if refused is None else [True] * (1 + is_known_at_once)
    )
    assert is_known_at_once == (refused is not None and not any(name.startswith("_") for name in params))
    assert (len(engine.sent), len(tap.live), len(engine.output_processor.known)) == ((refused is None,) * 3)


SCHEMA_OF_1_MB = StructuredOutputsParams(json='{"description": "' + "a" * 2**20 + '"}')


@pytest.mark.parametrize(
    ("prompts", "params", "refused"),
    [
        pytest.param([32_000], {"prompt_logprobs": 1, "max_tokens": 1}, None, id="a prompt of an evaluation"),
        pytest.param([16_384], {"prompt_logprobs": 20, "max_tokens": 1}, None, id="20 for each token of a prompt"),
        pytest.param([100], {"logprobs": 20, "max_tokens": 4096}, None, id="20 for each token of an answer"),
        pytest.param([100], {"n": 8, "logprobs": 5, "max_tokens": 1024}, None, id="choices"),
        pytest.param([2048] * 128, {"logprobs": 1, "prompt_logprobs": 1, "max_tokens": 1}, None, id="echoed prompts"),
        pytest.param([4096] * 64, {"logprobs": 1, "prompt_logprobs": 1, "max_tokens": 1}, None, id="long echoes"),
        pytest.param([100], {"n": 64, "logprobs": 20, "max_tokens": None}, None, id="no limit"),
        pytest.param([100], {"n": 64, "logprobs": 20, "max_tokens": 32_668}, None, id="the rest of the context"),
        pytest.param([100], {"logprobs": 20, "max_tokens": 32_667}, "Set max_tokens to at most 31207,", id="a limit"),
        pytest.param([100], {"n": 64, "logprobs": 20, "max_tokens": 4096}, "at most 487,", id="choices and tokens"),
        pytest.param([100], {"logprob_token_ids": [1] * 128, "max_tokens": 5500}, "at most 5080,", id="named tokens"),
        pytest.param([100], {"logprobs": -1, "max_tokens": 6}, "at most 5,.* or stream", id="the whole vocabulary"),
        pytest.param([100] * 2048, {"logprobs": 20, "max_tokens": 16}, "Divide the call", id="prompts and tokens"),
        pytest.param([16_384], {"n": 64, "prompt_logprobs": 20, "max_tokens": 1}, "of prompt tokens", id="choices"),
        pytest.param(
            [9000],
            {"n": 64, "logprobs": 20, "prompt_logprobs": 20, "max_tokens": 9},
            r"Divide .*choices\. \(",
            id="echo",
        ),
        pytest.param([4096], {"n": 2048, "max_tokens": 1}, None, id="many choices of one prompt"),
        pytest.param([32_000], {"n": 2048, "max_tokens": 1}, "bytes of copies", id="copies of a prompt"),
        pytest.param([16_000] * 9, {"n": 200, "max_tokens": 1}, "bytes of copies", id="copies of several prompts"),
        pytest.param([9] * 50, {"structured_outputs": SCHEMA_OF_1_MB}, None, id="copies of a schema"),
        pytest.param([9] * 90, {"structured_outputs": SCHEMA_OF_1_MB}, "bytes of copies", id="too many of a schema"),
        pytest.param([9], {"n": 2, "seed": 2**70}, None, id="a number that vLLM cannot send"),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_call_that_multiplies_what_it_asks_for_is_refused(begin, prompts, params, refused, is_streamed):
    """A stream has the logprobs of generated tokens in small parts, and those of a prompt at once."""
    kind = RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY
    made = SamplingParams(temperature=1.0, output_kind=kind, **params)
    tokens = {number: [1] * number for number in prompts}
    check = EngineTap(Engine(), time.monotonic)._check_asked  # noqa: SLF001 -- what follows checks formats, slowly
    begin()

    def ask():
        for number in prompts:
            check({"type": "token", "prompt_token_ids": tokens[number]}, made)

    if refused is None or (is_streamed and params.get("prompt_logprobs") is None and "copies" not in refused):
        ask()
    else:
        with pytest.raises(VLLMValidationError, match=refused):
            ask()


def test_the_logprobs_of_a_transcription_are_in_no_answer(tap, begin):
    """It has several requests, each up to the end of the context."""
    begin(asked=Asked.of_call("/v1/audio/transcriptions"))
    params = SamplingParams(logprobs=1, max_tokens=32_768, output_kind=RequestOutputKind.FINAL_ONLY)
    for _ in range(20):
        tap._check_asked({"decoder_prompt": {"prompt_token_ids": [1]}}, params)  # noqa: SLF001


@pytest.mark.parametrize(
    ("path", "is_item", "said"),
    [
        ("/v1/completions", False, "Set max_tokens to .* or stream the answer"),
        ("/v1/chat/completions", False, "Set max_completion_tokens to .* or stream the answer"),
        ("/v1/responses", True, r"Set max_output_tokens to .* choices\. \("),
        ("/v1/chat/completions/batch", False, r"Set max_completion_tokens to .* choices\. \("),
    ],
)
def test_a_refusal_names_what_the_call_can_change(tap, begin, path, is_item, said):
    call = begin(asked=Asked.of_call(path, is_item=is_item))
    params = SamplingParams(logprobs=20, max_tokens=32_000, output_kind=RequestOutputKind.FINAL_ONLY)

    with pytest.raises(VLLMValidationError, match=said):
        tap._check_asked({"prompt_token_ids": [1]}, params)  # noqa: SLF001
    call.timing.first_at = 1.0
    tap._check_asked({"prompt_token_ids": [1]}, params)  # noqa: SLF001 -- a later turn: no longer by its limit


def tools(number, schema=None):
    return [{"type": "function", "function": {"name": "f", "parameters": schema or {}}}] * number


def nested(levels, values):
    return [0] * values if levels == 0 else [nested(levels - 1, values)]


def calls(arguments):
    return [{"role": "assistant", "tool_calls": iter([{"function": {"name": "f", "arguments": arguments}}])}]


SCHEMA = {"properties": {f"p{n}": {"type": "string", "description": "d" * 60} for n in range(20)}}


@pytest.mark.parametrize(
    ("messages", "options", "refused"),
    [
        pytest.param(4096, {"tools": tools(100, SCHEMA), "enable_thinking": False}, None, id="an agent"),
        pytest.param(4097, {}, "messages: found 4097", id="messages"),
        pytest.param(1, {"tools": tools(1024)}, None, id="1024 tools"),
        pytest.param(1, {"tools": tools(1025)}, "tools: found 1025", id="tools"),
        pytest.param(1, {"bos_token": "", "mine": "x" * 65}, None, id="another token"),
        pytest.param(1, {"eos_token": "x" * 65}, "chat_template_kwargs.eos_token: found the string", id="a long token"),
        pytest.param(1, {"pad_token": ["x"]}, "chat_template_kwargs.pad_token: found a list", id="a list of tokens"),
        pytest.param(1, {"image_token": "x" * 65}, "chat_template_kwargs.image_token", id="a token of this model"),
        pytest.param(1, {"tools": tools(1, nested(180, 15_000))}, "levels of JSON", id="nested tools"),
        pytest.param(1, {"custom_tools": nested(180, 15_000)}, "levels of JSON", id="nested arguments of the template"),
        pytest.param(1, {"mine": [[]] * 99_000}, None, id="many lists"),
        pytest.param(1, {"mine": [[]] * 100_000}, "more than 300000 levels of JSON", id="too many lists"),
        pytest.param(calls(json.dumps({"a": nested(180, 15_000)})), {}, "levels of JSON", id="a nested call"),
        pytest.param(calls("[" * 100_000), {}, None, id="a call that is no JSON"),
    ],
)
def test_a_chat_that_a_template_could_write_as_gigabytes_is_refused(engine, messages, options, refused):
    backend, own = engine.tokenizer.backend_tokenizer, {"image_token": "<image>"}
    engine.tokenizer = type(engine.tokenizer)(tokenizer_object=backend, eos_token="</s>", extra_special_tokens=own)
    EngineTap(engine, time.monotonic)
    chat = [{"role": "user", "content": ""}] * messages if isinstance(messages, int) else messages
    params = ChatParams(chat_template_kwargs=options)

    if refused is None:
        assert engine.render_messages(chat, params) == asyncio.run(engine.render_messages_async(chat, params))
        return
    with pytest.raises(VLLMValidationError, match=refused):
        engine.render_messages(chat, params)
    with pytest.raises(VLLMValidationError, match=refused):
        asyncio.run(engine.render_messages_async(chat, params))


def test_the_v1_model_runner_allows_more_tokens_than_a_table_has():
    params = SamplingParams(allowed_token_ids=[1] * 1025, stop_token_ids=list(range(129)), min_tokens=1)

    assert excess(params, has_tables=True)
    assert excess(params, has_tables=False) is None


def test_an_administrator_may_raise_the_tokens_of_bad_words_as_in_vllm(monkeypatch):
    params = SamplingParams()
    params._bad_words_token_ids = [[1] * 1500]  # noqa: SLF001 -- vLLM computes it
    monkeypatch.setenv("VLLM_MAX_BAD_WORDS_TOTAL_TOKENS", "1500")

    assert excess(params, has_tables=True) is None


def recurring(count, most):
    """Tokens whose end repeats at many distances, and nowhere `count` times: ...abacabadabacaba for a count of 2."""
    found = []
    for token in range(most):
        if len(found) > most * count:
            break
        found = [*found, token] * (count - 1) + found
    return found


@pytest.mark.parametrize(
    ("least", "most", "count"),
    [(1, 512, 2), (1, 500, 4), (5, 64, 5), (8, 128, 3), (16, 22, 4), (500, 500, 2), (0, 9, 24)],
)
def test_vllm_compares_few_tokens_after_each_one_that_it_adds(least, most, count):
    class Tokens(list):
        num_read = 0

        def __getitem__(self, place):
            self.num_read += 1
            return super().__getitem__(place)

    params = RepetitionDetectionParams(max_pattern_size=most, min_pattern_size=least, min_count=count)
    almost = max(1, least) * count - 1
    num_read = []
    for text in ([1] * 5000 + [2] + [1] * almost, recurring(count, most), [1] * most * count):
        tokens = Tokens(text)
        check_sequence_repetition(tokens, params)
        num_read.append(tokens.num_read)

    assert excess(SamplingParams(repetition_detection=params), has_tables=True) is None
    assert max(num_read) <= 11_000, "about 80 ns for each: below 1 ms"


AMBIGUOUS = "root ::= (s | t)*\ns ::= [a-z]* [a-z]* [a-z]*\nt ::= s s\n"
LOOKS_AHEAD = json.dumps({"type": "string", "pattern": "^(?=a)"})


def tag(**form):
    return json.dumps({"type": "structural_tag", "format": form})


@pytest.mark.parametrize(
    ("configured", "form", "expected"),
    [
        pytest.param("auto", {"grammar": AMBIGUOUS}, "guidance", id="a grammar"),
        pytest.param("auto", {"json": "{}"}, "guidance", id="a schema"),
        pytest.param("auto", {"choice": ["a", "b"]}, "guidance", id="a choice"),
        pytest.param("auto", {"json": LOOKS_AHEAD}, "look-around", id="a schema that llguidance does not know"),
        pytest.param("auto", {"grammar": "root ::= ("}, "rammar", id="a wrong grammar"),
        pytest.param(
            "auto", {"structural_tag": tag(type="json_schema", json_schema={})}, "xgrammar", id="a structural tag"
        ),
        pytest.param(
            "auto", {"structural_tag": tag(type="regex", pattern="(a|b){1,9}")}, "xgrammar", id="a tag with a group"
        ),
        pytest.param(
            "auto", {"structural_tag": tag(type="grammar", grammar=AMBIGUOUS)}, "each step", id="a tag with a grammar"
        ),
        pytest.param(
            "auto",
            {"structural_tag": tag(type="regex", pattern="((a*)*)*")},
            "each step",
            id="a tag with nested groups",
        ),
        pytest.param("xgrammar", {"json": "{}"}, "xgrammar", id="another backend"),
    ],
)
def test_structured_output_is_checked_on_threads_for_the_library_that_carries_it_out(
    engine, begin, configured, form, expected
):
    engine.input_processor.structured_outputs_config = StructuredOutputsConfig(backend=configured)
    tap = EngineTap(engine, time.monotonic)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**form))
    call = begin()

    async def add():
        await call.take_media()
        work = asyncio.ensure_future(engine.add_request("r", None, params))
        await asyncio.sleep(0)
        assert not work.done(), "the event loop does not wait for the check"
        assert not call.media.has_place, "and no other call with media"
        return await work

    try:
        found = asyncio.run(add())
    except VLLMValidationError as error:
        found = error

    assert engine.input_processor.structured_outputs_config is None, "vLLM does not check again"
    if isinstance(found, Exception):
        assert expected in str(found)
    else:
        assert (params.structured_outputs._backend, found) == (expected, threading.current_thread())  # noqa: SLF001
    assert tap.live == {}


@pytest.fixture
def search(tap, begin):
    """`search(prompt, beams, max_tokens)` begins a beam search of a call, and returns whether vLLM has got it."""
    begin(asked=Asked.of_call("/v1/audio/transcriptions"))
    serving = SimpleNamespace(beam_search=lambda **given: sorted(given))
    tap.limit_searches(serving)

    def begun(num_prompt, num_beams, max_tokens):
        prompt = {"type": "enc_dec", "decoder_prompt": {"type": "token", "prompt_token_ids": [1] * num_prompt}}
        params = BeamSearchParams(beam_width=num_beams, max_tokens=max_tokens)
        given = serving.beam_search(prompt=prompt, request_id="r", params=params, lora_request=None)
        return given == ["lora_request", "params", "prompt", "request_id"]

    return begun


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "refused"),
    [
        (30_000, 300, "keep more than 256 MiB .* Set max_completion_tokens to at most 111,"),
        (30_000, 112, "at most 111,"),
        (100, 32_000, "at most 1782,"),
        (100, 1783, "at most 1782,"),
    ],
)
def test_a_beam_search_that_keeps_too_many_tokens_is_refused(search, num_prompt, max_tokens, refused):
    with pytest.raises(VLLMValidationError, match=refused):
        search(num_prompt, 10, max_tokens)


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(30_000, 111), (100, 1782), (30_000, 16)])
def test_a_call_may_have_beam_searches_until_they_keep_too_many_tokens(search, num_prompt, max_tokens):
    assert search(num_prompt, 10, max_tokens)

    with pytest.raises(
        VLLMValidationError, match="Set max_completion_tokens to a lower number, divide the call, or ask"
    ):
        any(not search(num_prompt, 10, max_tokens) for _ in range(9))


@pytest.mark.parametrize(("text", "is_refused"), [("a" * 32, False), ("a" * 33, True)])
def test_the_texts_of_scores_are_tokenized_on_the_threads_of_vllm_if_they_can_fit(engine, tap, text, is_refused):
    class Scoring:
        async def _build_prompts(self, request, tokenizer, max_model_len):
            return threading.current_thread()

    scoring = Scoring()
    tap.build_scores_on_threads(scoring)
    request, tokenizer = SimpleNamespace(query=[1, 2], items=["b", text]), SimpleNamespace(max_chars_per_token=4)
    work = scoring._build_prompts(request, tokenizer, 8)  # noqa: SLF001 -- the tap replaced it

    if is_refused:
        with pytest.raises(VLLMValidationError, match="33 characters"):
            asyncio.run(work)
    else:
        assert asyncio.run(work) in engine._executor._threads  # noqa: SLF001


@pytest.mark.usefixtures("tap")
@pytest.mark.parametrize("threads", ["_executor", "_mm_executor"])
def test_the_name_of_an_image_is_of_one_tenant(engine, begin, threads):
    def named(names):
        name_media = engine.renderer._process_mm_uuids  # noqa: SLF001 -- the tap replaced it
        return getattr(engine.renderer, threads).submit(name_media, {}, {}, names, "mm-0").result()

    outside = named({"image": ["logo"]})
    begin()

    assert outside == {"image": ["logo"]}
    assert named({}) == {}
    assert named({"image": ["logo", None], "audio": [""]}) == {"image": ["lab\nlogo", None], "audio": ["lab\n"]}
