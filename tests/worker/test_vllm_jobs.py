"""Jobs through a server of vLLM, from a real Valkey to an app without a model."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from served_vllm import BODY, as_item, leave, reported, rounds, running, submit, wait_until

from ballast_cli.explain import scene
from ballast_policy.request import RequestClass
from ballast_queue.job import JobState
from ballast_worker.waiting_reasons import why

pytestmark = pytest.mark.anyio


async def begun_elsewhere(queue, *tokens: int, requests: int = 1, **body) -> str:
    """Run an item in a server that computes tokens of its first request, then gives it back; return its job."""
    async with running() as first:
        job_id = await submit(queue, [as_item("a", **body)])
        await first.sent(f"r{requests}")
        for token in tokens:
            first.engine.give("r1", token)
        await first.server.drain.run()
    return job_id


async def test_an_item_that_is_given_back_goes_on_after_its_tokens(vllm_queue):
    job_id = await begun_elsewhere(vllm_queue, 11, 12)
    counts = vllm_queue.jobs.get(job_id).counts
    async with running() as second:
        request = await second.sent("r1")
        second.engine.give("r1", 13)
        await second.server.drain.run()
    async with running() as third:
        last = await third.sent("r1")
        third.engine.give("r1", 14, reason="length")
        await wait_until(lambda: vllm_queue.jobs.get(job_id).state is JobState.COMPLETED)
    (result,) = vllm_queue.results.read(job_id)

    assert (counts.waiting, counts.leased) == (1, 0)
    assert request.prompt_token_ids == [1, 2, 3, 11, 12]
    assert request.sampling_params.max_tokens == 6
    assert request.sampling_params.extra_args["ballast"]["num_computed"] == 5
    assert last.prompt_token_ids == [1, 2, 3, 11, 12, 13]
    assert last.sampling_params.extra_args["ballast"]["num_computed"] == 6
    assert result.body["tokens"] == [11, 12, 13, 14]
    assert (result.tokens_in, result.tokens_out) == (3, 4)


@pytest.mark.parametrize("sampling", [{"logprobs": 1}, {"max_tokens": 1}], ids=["logprobs", "nothing is left"])
async def test_an_item_that_cannot_go_on_starts_again_and_its_tokens_count_as_computed(vllm_queue, sampling):
    await begun_elsewhere(vllm_queue, 11, sampling=sampling)
    async with running() as second:
        request = await second.sent("r1")
        await second.server.drain.run()

    assert request.prompt_token_ids == [1, 2, 3]
    assert request.sampling_params.extra_args["ballast"]["num_computed"] == 4


async def test_the_computed_tokens_of_an_item_are_divided_between_its_requests(vllm_queue):
    await begun_elsewhere(vllm_queue, 11, requests=4, prompt=["Once"] * 4)
    async with running() as second:
        await second.sent("r4")
        places = [request.sampling_params.extra_args["ballast"] for request in second.engine.sent.values()]
        await second.server.drain.run()

    assert [place.get("num_computed", 0) for place in places] == [3, 1, 0, 0]


async def test_an_item_starts_again_when_the_arguments_of_vllm_changed(vllm_queue, variables):
    await begun_elsewhere(vllm_queue, 11)
    variables("BALLAST_ENGINE_BACKEND", "vllm")
    variables("BALLAST_ENGINE_VLLM", "{args: [--tokenizer=other]}")
    async with running() as second:
        changed = await second.sent("r1")
        second.engine.give("r1", 12)
        await second.server.drain.run()
    async with running() as third:
        same = await third.sent("r1")
        await third.server.drain.run()

    assert (changed.prompt_token_ids, same.prompt_token_ids) == ([1, 2, 3], [1, 2, 3, 12])


@pytest.mark.parametrize("kind", ["generate", "pooling"])
async def test_items_with_many_prompts_are_claimed_as_their_requests_get_slots(vllm_queue, kind):
    """The scheduler of an encoder reports between two steps, when no request of it holds a slot."""
    async with running(slots=8, model_config={"runner_type": kind}) as found:
        job_id = await submit(vllm_queue, [as_item(f"{i}", prompt=["Once"] * 40) for i in range(30)])
        held = []
        for ended in range(3):
            await found.sent(f"r{40 * ended + 8}")
            await reported(found, RequestClass.OFFLINE, 8 if kind == "generate" else 0)
            await rounds(found, 5)
            found.engine.give(f"r{40 * ended + 1}", 5, reason="stop")
            await wait_until(lambda: len(found.server.engine.items) == 2)
            await rounds(found, 5)
            held.append(len(found.server.engine.items))
            for i in range(40 * ended + 2, 40 * ended + 41):
                found.engine.give(f"r{i}", 5, reason="stop")
        await leave(found)
        counts, recorder = vllm_queue.jobs.get(job_id).counts, found.server.feeder.recorder

    assert set(held) == {2}, "one that has begun, and one ahead"
    assert not sum(recorder.tpot["offline"].counts), "no answer has a second token"
    assert (counts.succeeded, counts.waiting, counts.failed) == (3, 27, 0)


async def test_an_item_with_many_prompts_at_the_cap_of_its_tenant_leaves_the_other_slots_to_others(
    vllm_queue, variables
):
    variables("BALLAST_OFFLINE_TENANTS", "[{name: capped, maxSlots: 3}, {name: other}]")
    async with running(slots=8) as found:
        job_id = await submit(vllm_queue, [as_item(f"{i}", prompt=["Once"] * 40) for i in range(9)], tenant="capped")
        await found.sent("r40")
        found.engine.give("r1", 5)
        await reported(found, RequestClass.OFFLINE, 3)
        await wait_until(lambda: [w.tenant_requests for w in vllm_queue.workers.statuses()] == [{"capped": 40}])
        [status], said = vllm_queue.workers.statuses(), why(vllm_queue.jobs.get(job_id), scene(vllm_queue))
        await submit(vllm_queue, [as_item(f"{i}") for i in range(9)], tenant="other")
        await wait_until(lambda: len(found.server.engine.items) >= 1 + 5)
        tenants = [item.call.caller.tenant for item in found.server.engine.items.values()]
        await leave(found)

    assert tenants.count("capped") == 1
    assert tenants.count("other") >= 5
    assert not status.can_claim
    assert any("its cap: 1 item of 40 requests under lease, at most 3 slots" in sentence for sentence in said), said


async def test_a_job_whose_adapter_gets_no_place_waits_for_one(vllm_queue):
    async with running(slots=8) as found:
        job_id = await submit(vllm_queue, [as_item(f"{i}") for i in range(90)])
        await found.sent("r1")
        held_up = found.engine.held_up = {f"r{n}": SimpleNamespace(tenant="default") for n in (1, 2)}
        await wait_until(lambda: [w.offline.held_up for w in vllm_queue.workers.statuses()] == [len(held_up)])
        said = why(vllm_queue.jobs.get(job_id), scene(vllm_queue))
        await leave(found)

    assert "hold all places for adapters (`--max-loras`): 2 prefetched items wait for a place" in said[-1]


async def test_the_queue_learns_of_an_adapter_that_is_loaded_later(vllm_queue):
    async with running() as found:
        await wait_until(lambda: vllm_queue.settings.read().models)
        found.app.state.openai_serving_models.lora_requests["late"] = object()
        await wait_until(lambda: "late" in vllm_queue.settings.read().models)


async def test_a_model_without_a_url_of_items_serves_online_and_refuses_items_with_a_sentence(vllm_queue):
    because = "the model of this queue serves no URL of items"
    early = await asyncio.to_thread(vllm_queue.submissions.submit, [as_item("a")])
    async with running(model_config={"runner_type": "pooling"}, urls=["/classify"]) as found:
        await wait_until(lambda: vllm_queue.jobs.get(early.job_id).state.is_over)
        late = await submit(vllm_queue, [as_item("a")])
        status = (await found.client.get("/ready")).status_code
    errors = [result.error["message"] for job_id in (early.job_id, late) for result in vllm_queue.results.read(job_id)]

    assert status == 200
    assert len(errors) == 2
    assert all(because in error for error in errors), errors


async def test_an_item_that_vllm_refuses_keeps_the_sentence_and_spends_no_other_attempt(vllm_queue):
    async with running():
        job_id = await submit(vllm_queue, [as_item("a", max_tokens=0)])
        await wait_until(lambda: vllm_queue.jobs.get(job_id).state.is_over)
    (result,) = vllm_queue.results.read(job_id)

    assert (result.status_code, result.error["message"]) == (400, "max_tokens must be at least 1")


async def test_an_item_that_runs_is_aborted_when_its_job_is_cancelled(vllm_queue):
    async with running() as found:
        job_id = await submit(vllm_queue, [as_item("a")])
        await found.sent("r1")
        found.engine.give("r1", 11)
        await asyncio.to_thread(vllm_queue.jobs.cancel, job_id)
        outcomes = found.server.feeder.recorder.outcomes
        await wait_until(lambda: outcomes["offline", "aborted"])
        await wait_until(lambda: vllm_queue.jobs.get(job_id).state.is_over and not found.server.tap.live)
        job, aborted, items = vllm_queue.jobs.get(job_id), found.engine.aborted, found.server.engine.items

    assert job.state is JobState.CANCELLED
    assert (job.counts.leased, job.counts.waiting, job.counts.succeeded) == (0, 0, 0)
    assert aborted == ["r1"]
    assert items == {}


async def test_items_in_flight_are_tried_again_when_enginecore_ends(vllm_queue):
    async with running() as found:
        job_id = await submit(vllm_queue, [as_item("a")])
        await found.sent("r1")
        found.engine.errored = True
        await wait_until(lambda: vllm_queue.jobs.get(job_id).counts.waiting)
    counts = vllm_queue.jobs.get(job_id).counts

    assert (counts.leased, counts.waiting) == (0, 1)


async def test_items_in_flight_are_tried_again_when_enginecore_hangs_and_the_server_has_failed(vllm_queue, variables):
    variables("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "1")
    async with running() as found:
        job_id = await submit(vllm_queue, [as_item("a")])
        await found.sent("r1")
        core, goes_on = found.engine.engine_core, asyncio.Event()
        call = core.call_utility_async

        async def hanging(method, argument):
            await goes_on.wait()
            return await call(method, argument)

        core.call_utility_async = hanging
        await wait_until(lambda: vllm_queue.jobs.get(job_id).counts.waiting)
        goes_on.set()
        polled = found.server.engine.latest
        await wait_until(lambda: found.server.engine.latest is not polled)
        probes = [await found.client.get(path) for path in ("/health", "/ready")]
        refused = await found.client.post("/v1/completions", json=BODY)
    counts = vllm_queue.jobs.get(job_id).counts

    assert (counts.leased, counts.waiting) == (0, 1)
    reason = "EngineCore of vLLM has not answered for 1 s (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)"
    assert [probe.status_code for probe in probes] == [503, 503]
    assert all(probe.json()["reason"].startswith(reason) for probe in probes)
    assert refused.status_code == 500
