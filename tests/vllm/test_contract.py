"""What Ballast requires of vLLM's private members.

The first part reads source: `VLLM_SOURCE=DIR` names the package of another version, which need not be installed. The
second part runs the installed version.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import source
from bare_core import BareCore
from members import USED
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import RequestStatus

import ballast_vllm
from ballast_openai.item_body import MOST_REQUESTS
from ballast_policy.fairness.ledger import INPUT_COST
from ballast_policy.request import OFFLINE
from ballast_vllm.core_failure import SENTENCES, STREAM_VARIABLE
from ballast_vllm.costs import MOST_STOP_TOKENS, MOST_TOKENS
from ballast_vllm.internals import PlanQueue
from ballast_vllm.refusals import CHECKS
from ballast_vllm.served_app import admit_prompts
from ballast_vllm.server import SEARCHING, STEP_LIMIT, STEP_SECONDS

CHUNKS = {"chunk_tokens": 32}
OWN = {path.stem: path.read_text() for path in Path(ballast_vllm.__file__).parent.glob("*.py")}
"""The modules of Ballast inside vLLM."""


def imports() -> Iterator[tuple[str, str]]:
    """Yield the modules of vLLM that Ballast imports from, with the names."""
    for code in OWN.values():
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                yield from ((str(node.module), alias.name) for alias in node.names)


@pytest.mark.parametrize(("module", "name"), sorted(set(imports())))
def test_every_import_from_vllm_is_there(module: str, name: str) -> None:
    assert name in source.names(module)


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, classes in USED.items() for name in classes])
def test_every_private_member_exists(module: str, name: str) -> None:
    assert module in OWN
    assert set(USED[module][name].split()) - source.members(name) == set()


def test_a_variable_inside_a_method_is_no_member() -> None:
    assert "request_queue = self.waiting" in source.text("Scheduler", "schedule")
    assert "request_queue" not in source.members("Scheduler")


def test_every_state_of_a_request_that_ballast_names_exists() -> None:
    named = {name for code in OWN.values() for name in re.findall(r"\bRequestStatus\.(\w+)", code)}

    assert {"RUNNING", "WAITING"} < named
    assert named - source.members("RequestStatus") == set()


def test_the_server_has_in_its_state_what_ballast_reads() -> None:
    read = {name for code in OWN.values() for name in re.findall(r"\bstate\.([a-z]\w+)", code)}
    own = {"ballast", "ballast_error", "connections"}

    assert {"args", "engine_client"} < read
    assert read - own - source.state_names("entrypoints/launchers/api_server/app_state.py") == {"server"}
    assert "server" in source.state_names("entrypoints/launchers/launcher.py")


def test_the_server_takes_its_signals_and_is_known_before_the_app_starts() -> None:
    code = ast.unparse(source.function("entrypoints/launchers/launcher.py", "serve_http"))
    before, started = code.split("server.serve(", maxsplit=1)
    meanwhile = started.split("loop.add_signal_handler(signal.SIGTERM", maxsplit=1)[0]

    assert "app.state.server = server" in before
    assert "signal.SIGINT" in meanwhile
    assert "await " not in meanwhile.replace("await shutdown_event.wait()", "")


@dataclass(eq=False)
class Probe:
    """A configuration that no check refuses, and that notes the fields that a check reads."""

    path: tuple[str, ...] = ()
    seen: set[tuple[str, ...]] = field(default_factory=set)

    def __getattr__(self, name: str) -> Probe:
        found = Probe((*self.path, name), self.seen)
        self.seen.add(found.path)
        return found

    def __gt__(self, _: object) -> bool:
        return False

    __ne__ = __eq__ = __gt__


def checked_fields() -> set[tuple[str, ...]]:
    """Return the fields that the refusals read, as paths from `VllmConfig`."""
    probe = Probe()
    for is_refused, _ in CHECKS:
        is_refused(probe)
    return probe.seen


@pytest.mark.parametrize("path", sorted(checked_fields()), ids=".".join)
def test_every_field_that_a_refusal_reads_exists(path: tuple[str, ...]) -> None:
    *sections, name = path
    owner = source.type_of("VllmConfig", sections[0]) if sections else "VllmConfig"

    assert name in source.members(owner)


def test_the_refusals_read_the_fields_of_the_settings_that_they_name() -> None:
    assert ("parallel_config", "prefill_context_parallel_size") in checked_fields()
    assert ("kv_transfer_config",) in checked_fields()


def test_schedule_asks_the_hook_for_running_and_for_waiting_requests():
    calls = [
        node
        for node in ast.walk(source.method("Scheduler", "schedule"))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._reserve_prefill_lookahead"
    ]

    assert len(calls) == 2


def test_images_are_encoded_after_the_hook_saw_the_tokens_of_the_request():
    assert source.text("Scheduler", "schedule").count("self._try_schedule_encoder_inputs(") == 2
    assert "if num_new_tokens == 0" in source.text("Scheduler", "_try_schedule_encoder_inputs")


def test_a_running_request_without_tokens_is_left_out_and_keeps_its_place():
    running = source.text("Scheduler", "schedule").split("_reserve_prefill_lookahead")[1]

    assert "if num_new_tokens == 0:\n            req_index += 1\n            continue" in running


def test_admissions_come_from_the_waiting_queue_in_its_order():
    code = source.text("Scheduler", "schedule")

    assert "request_queue = self.waiting" in code
    assert "request = request_queue.peek_request()" in code
    assert "request = request_queue.pop_request()" in code


PARAMETERS = {
    "Scheduler.schedule": "throttle_prefills",
    "Scheduler.update_from_output": "scheduler_output model_runner_output",
    "Scheduler.add_request": "request",
    "Scheduler._preempt_request": "request timestamp ...",
    "Scheduler._handle_blocked_waiting_request": "request",
    "Scheduler._reserve_prefill_lookahead": "request num_computed_tokens num_new_tokens",
    "Scheduler._try_schedule_encoder_inputs": "request num_computed_tokens num_new_tokens ...",
    "AsyncMPClient.add_request_async": "request",
    "AsyncMPClient.call_utility_async": "method",
    "OutputProcessor.process_outputs": "engine_core_outputs ...",
    "OutputProcessor.has_request": "request_id",
    "SamplingParams._validate_structured_outputs": "model_config structured_outputs_config tokenizer",
    "AsyncLLM.add_request": "request_id prompt params ...",
    "GuidanceGrammar.accept_tokens": "request_id tokens",
    "BaseRenderer.render_messages": "messages params",
    "BaseRenderer.render_messages_async": "messages params",
    "ServingGenerativeScoring._build_prompts": "request tokenizer max_model_len",
    "BeamSearchOnlineMixin.beam_search": "prompt request_id params ...",
    "MsgpackEncoder.encode": "obj",
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_method_that_ballast_overrides_or_calls_has_its_parameters(name: str) -> None:
    expected, are_more = PARAMETERS[name].removesuffix(" ...").split(), PARAMETERS[name].endswith("...")
    found = source.parameters(*name.split("."))[1:]

    assert expected == (found[: len(expected)] if are_more else found)


def test_the_drafts_of_a_step_follow_a_lookup_by_batch_size():
    code, placeholders = source.text("Scheduler", "schedule"), source.text("AsyncScheduler", "_update_after_schedule")

    assert "num_spec_tokens_to_schedule = self.dynamic_sd_lookup[len(num_scheduled_tokens)]" in code
    assert "self.num_spec_tokens > 0 and self.dynamic_sd_lookup is None" in code  # else an admission has no drafts
    assert "[-1] * scheduler_output.num_spec_tokens_to_schedule" in placeholders


def test_a_prefix_match_is_the_blocks_of_each_table_and_the_number_of_their_tokens():
    found = source.method("KVCacheManager", "get_computed_blocks")
    parameters = source.parameters("KVCacheManager", "get_computed_blocks")

    assert parameters[:2] == ["self", "request"]
    assert len(found.args.defaults) == len(parameters[2:])
    assert ast.unparse(found.returns) == "tuple[KVCacheBlocks, int, int]"
    assert source.type_of("KVCacheBlocks", "blocks") == "tuple[Sequence[KVCacheBlock], ...]"


def test_an_admission_asks_for_the_blocks_of_the_whole_prompt():
    names = [argument.arg for argument in source.method("KVCacheCoordinator", "get_num_blocks_to_allocate").args.args]
    code = source.text("KVCacheManager", "allocate_slots")

    assert names[:4] == ["self", "request_id", "num_tokens", "new_computed_blocks"]
    assert names[-2:] == ["apply_admission_cap", "prefill_end"]
    assert "full_num_tokens = min(request.num_tokens, self.max_model_len)" in code
    assert "num_tokens=full_num_tokens" in code


def test_a_request_that_failed_is_a_member_of_a_set():
    assert "self.encoder_cache_mismatch_reqs: set[str] = set()" in source.text("Scheduler", "__init__")


def test_a_utility_call_is_a_method_of_the_engine_core():
    code = (source.root() / source.FILES["EngineCore"]).read_text()

    assert "getattr(self, method_name)" in code


def test_all_requests_and_outputs_pass_the_two_methods_that_ballast_replaces():
    code = ast.unparse(source.class_of("AsyncLLM"))

    assert code.count("engine_core.add_request_async(") == 3  # one is for KV connectors, which Ballast refuses
    assert "output_processor.process_outputs(" in code
    assert source.method("AsyncMPClient", "call_utility_async").args.vararg is not None
    assert [ast.unparse(each) for each in source.method("AsyncLLM", "errored").decorator_list] == ["property"]


def test_structured_output_is_checked_in_one_place_that_ballast_replaces():
    check = source.text("SamplingParams", "_validate_structured_outputs")

    assert "structured_outputs_config is None or" in check.split("return", maxsplit=1)[0]
    assert ast.unparse(source.class_of("InputProcessor")).count("self.structured_outputs_config") == 2
    assert "self.add_request(request_id, prompt, sampling_params, " in source.text("AsyncLLM", "generate")
    assert "if self.backend is None:" in source.text("StructuredOutputManager", "grammar_init")


def test_all_chats_pass_the_two_methods_that_ballast_replaces():
    renderer = source.class_of("BaseRenderer")
    code = ast.unparse(renderer)

    for name in ("render_messages", "render_messages_async"):
        assert f"self.{name}(conversation, chat_params)" in code
    for file in sorted((source.root() / "entrypoints").rglob("*.py")):
        assert "renderer.render_messages(" not in file.read_text(), file


def test_the_tables_of_a_step_have_the_sizes_that_no_request_exceeds():
    """vLLM raises an exception in EngineCore for more."""
    code = (source.root() / "v1/worker/gpu/sample/logit_bias.py").read_text()
    words = (source.root() / "envs.py").read_text()

    for name in ("ALLOWED_TOKEN_IDS", "LOGIT_BIAS_TOKENS"):
        assert f"MAX_NUM_{name} = {MOST_TOKENS}\n" in code
    assert f"MAX_NUM_STOP_TOKEN_IDS = {MOST_STOP_TOKENS}\n" in code
    assert "stop_token_ids = sampling_params.all_stop_token_ids" in code
    assert f"VLLM_MAX_BAD_WORDS_TOTAL_TOKENS: int = {MOST_TOKENS}\n" in words


def test_scores_are_tokenized_in_one_place_that_awaits_nothing():
    build = source.method("ServingGenerativeScoring", "_build_prompts")

    assert "serving_generative_scoring" in source.state_names("entrypoints/generate/api_router.py")
    assert not [node for node in ast.walk(build) if isinstance(node, ast.Await)]
    assert "await self._build_prompts(" in source.text("ServingGenerativeScoring", "create_generative_scoring")


def test_beam_searches_begin_in_the_parts_that_ballast_limits():
    """They pass the prompt with its tokens by name. No other part of the app reads the field of a search."""
    parts = {
        "OpenAIServingChat": ("chat", "entrypoints/generate/api_router.py"),
        "OpenAIServingCompletion": ("completion", "entrypoints/generate/api_router.py"),
        "OpenAIServingTranscription": ("transcription", "entrypoints/speech_to_text/factories.py"),
        "OpenAIServingTranslation": ("translation", "entrypoints/speech_to_text/factories.py"),
    }

    assert set(SEARCHING) == {f"openai_serving_{name}" for name, _ in parts.values()}
    for name, file in parts.values():
        assert f"openai_serving_{name}" in source.state_names(file)
    searching = {
        file.parent.name
        for file in (source.root() / "entrypoints").rglob("*.py")
        if re.search(r"self\.beam_search\(\s*prompt=engine_input,", file.read_text())
    }
    assert searching == {"chat_completion", "completion", "base"}


LAUNCH = {
    "entrypoints/launchers/api_server/app_state.py": "init_app_state engine_client state args supported_tasks",
    "entrypoints/launchers/api_server/entry.py": "build_async_engine_client args",
    "entrypoints/launchers/app.py": "build_app args supported_tasks model_config",
    "entrypoints/launchers/cli_args.py": "validate_parsed_serve_args args",
    "entrypoints/serve/utils/api_utils.py": "cli_env_setup",
    "logger.py": "configure_logging_from_args args",
}
"""Functions with their parameters."""


@pytest.mark.parametrize("file", LAUNCH)
def test_what_starts_a_server_has_its_parameters(file):
    name, *parameters = LAUNCH[file].split()

    assert source.function_parameters(file, name) == parameters


def test_the_parser_of_a_server_takes_the_model_first_and_has_its_own_checks():
    file = "entrypoints/launchers/cli_args.py"

    assert source.function_parameters(file, "make_arg_parser") == ["parser"]
    assert "'model_tag'" in ast.unparse(source.function(file, "make_arg_parser"))
    assert source.parameters("ServeSubcommand", "cmd") == ["args"]
    assert "uvloop.run(run_server(args))" in source.text("ServeSubcommand", "cmd")


def test_a_server_is_started_as_ballast_starts_it_but_for_its_signals():
    body = source.function("entrypoints/launchers/api_server/entry.py", "run_server").body

    assert [ast.unparse(statement) for statement in body if not isinstance(statement, ast.FunctionDef)][1:] == [
        "decorate_logs('APIServer', skip_if_decorated=True)",
        "signal.signal(signal.SIGTERM, _interrupt_init)",
        "listen_address, sock = setup_server(args, reuse_port=False)",
        "await run_server_worker(listen_address, sock, args, **uvicorn_kwargs)",
    ]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_vllm_logs_why_a_process_ends_to_the_stream_that_a_variable_names(sentence):
    code = "".join(
        (source.root() / "v1" / file).read_text() for file in ("engine/core.py", "executor/multiproc_executor.py")
    )

    assert f'logger.exception("{sentence}")' in code
    assert f'"stream": envs.{STREAM_VARIABLE}' in (source.root() / "logger.py").read_text()


def test_the_longest_step_has_the_variable_and_the_default_of_vllm():
    assert f'os.getenv("{STEP_LIMIT}", "{STEP_SECONDS:g}")' in (source.root() / "envs.py").read_text()


# The installed version


def test_a_call_may_have_as_many_prompts_as_an_item(monkeypatch):
    monkeypatch.setenv("VLLM_MAX_COMPLETION_PROMPTS", "")  # undone after the test
    monkeypatch.delenv("VLLM_MAX_COMPLETION_PROMPTS")
    admit_prompts()

    assert len(CompletionRequest(model="m", prompt=["x"] * MOST_REQUESTS).prompt) == MOST_REQUESTS
    with pytest.raises(VLLMValidationError, match="exceeds the maximum"):
        CompletionRequest(model="m", prompt=["x"] * (MOST_REQUESTS + 1))


def test_a_plan_queue_is_a_whole_request_queue():
    assert not RequestQueue.__abstractmethods__ - set(vars(PlanQueue))


def test_a_grant_caps_a_chunk_and_no_grant_keeps_the_kv(tiny_model):
    core = BareCore(tiny_model, policy=CHUNKS)
    scheduler = core.scheduler
    first = core.add(prompt=100)
    core.step()
    request = scheduler.requests[first]
    held = len(scheduler.kv_blocks.tables[first])

    output = scheduler.run_planned({first: 7}, ())
    assert output.num_scheduled_tokens == {first: 7}
    output = scheduler.run_planned({}, ())
    assert output.num_scheduled_tokens == {}
    assert scheduler.running == [request]
    assert len(scheduler.kv_blocks.tables[first]) >= held > 0


def test_only_the_admissions_of_the_plan_get_a_slot_in_its_order(tiny_model):
    core = BareCore(tiny_model)
    scheduler = core.scheduler
    ids = [core.add(prompt=20) for _ in range(4)]
    chosen = [scheduler.requests[ids[3]], scheduler.requests[ids[1]]]

    output = scheduler.run_planned({ids[3]: 20, ids[1]: 5}, chosen)

    assert output.num_scheduled_tokens == {ids[3]: 20, ids[1]: 5}
    assert scheduler.running == chosen
    assert list(scheduler.waiting) == [scheduler.requests[ids[0]], scheduler.requests[ids[2]]]


def test_an_admission_that_does_not_fit_holds_up_no_later_one(tiny_model):
    core = BareCore(tiny_model, blocks=5)
    large, small = core.add(prompt=100), core.add(prompt=20)

    found = [
        core.scheduler.run_planned({request_id: 20}, [core.scheduler.requests[request_id]]).num_scheduled_tokens
        for request_id in (large, small)
    ]

    assert found == [{}, {small: 20}]


def test_a_preempted_request_waits_without_kv(tiny_model):
    core = BareCore(tiny_model)
    scheduler = core.scheduler
    first = core.add(prompt=64)
    core.step()
    request = scheduler.requests[first]

    scheduler.preempt(request, 1.0)

    assert request.status == RequestStatus.PREEMPTED
    assert request.num_computed_tokens == 0
    assert scheduler.kv_blocks.held(first) == 0
    assert scheduler.running == []
    assert list(scheduler.waiting) == [request]
    core.check()


def test_finished_and_aborted_requests_are_named_until_the_next_step(tiny_model):
    core = BareCore(tiny_model)
    ended, aborted = core.add(output=1), core.add(output=50)
    core.step()

    core.abort(aborted)

    assert core.scheduler.finished_req_ids == {ended, aborted}
    assert core.scheduler.ballast_stats()["stats"].online.running == 0
    core.step()
    assert core.scheduler.finished_req_ids == set()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("num_steps", "num_prompt"), [(1, 400), (3, 400), (1, 9)])
def test_the_prompt_tokens_of_a_step_that_aborts_the_request_are_charged(tiny_model, is_async, num_steps, num_prompt):
    core = BareCore(tiny_model, is_async=is_async, policy=CHUNKS)
    scheduler = core.scheduler
    cancelled = core.add("offline", prompt=num_prompt, tenant="a")
    for _ in range(num_steps - 1):
        core.step()
    output = scheduler.schedule()
    core.flights.append((output, core.run(output)))
    num_computed = scheduler.requests[cancelled].num_computed_tokens

    core.abort(cancelled)
    while core.flights:
        core.process()

    driver = scheduler.driver
    assert 0 < num_computed <= num_prompt
    assert (num_computed == num_prompt) is (num_prompt == 9)
    assert driver.counters.tokens.classes[OFFLINE].prefill_tokens == num_computed
    assert driver.counters.tokens.service == {(OFFLINE, "a"): INPUT_COST * num_computed}
    assert driver.host.ledgers[OFFLINE].service("a") == INPUT_COST * num_computed
    core.check_idle()


def test_the_blocks_of_a_shared_prefix_count_their_users(tiny_model):
    core = BareCore(tiny_model, blocks=30)
    blocks = core.scheduler.kv_blocks
    prompt = list(range(100))
    first = core.add(prompt=prompt)
    core.step()
    waiting = core.add(prompt=prompt)
    record = core.scheduler.driver.records[waiting]

    blocks.match_prefix(core.scheduler.requests[waiting], record)

    assert (record.num_cached, record.num_cached_idle) == (96, 0)
    assert blocks.num_free == 29 - blocks.held(first)
    core.step()
    blocks.num_shared_blocks = 6
    assert (blocks.held(first), blocks.shared(first), blocks.num_cached) == (7, 6, 0)
    core.abort(first)
    core.abort(waiting)
    blocks.match_prefix(core.scheduler.requests[core.add(prompt=prompt, request_id="last")], record)
    assert (record.num_cached, record.num_cached_idle) == (96, 6)
    assert blocks.num_free == 29
    assert blocks.num_cached >= 6


def test_requests_with_different_salts_share_no_block(tiny_model):
    core = BareCore(tiny_model)
    prompt = list(range(100))
    core.add(prompt=prompt, cache_salt="a\n")
    core.step()

    for salt, num_cached in (("b\n", 0), (None, 0), ("a\n", 96)):
        waiting = core.add(prompt=prompt, cache_salt=salt)
        record = core.scheduler.driver.records[waiting]
        core.scheduler.kv_blocks.match_prefix(core.scheduler.requests[waiting], record)
        assert record.num_cached == num_cached, salt
