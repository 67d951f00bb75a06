"""vLLM's cache of encoded images may hold only one large image. No request waits for one that waits itself."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from bare_core import AsyncTimed, BareCore, SyncTimed
from real_core import RealCore
from small_models import make_idefics
from vllm import SamplingParams

STEP_TOKENS = 512
LARGE = range(10, 490)
"""The place of an image that fills the cache."""
AT_ONCE: dict[str, Any] = {"disable_chunked_mm_input": True}
POLICY = {"offline_share": 0.0, "ttft": 0.8, "tpot": 0.06, "chunk_tokens": 64}


@pytest.fixture(scope="module")
def seeing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_idefics(tmp_path_factory.mktemp("models") / "idefics")


def run(core: BareCore) -> None:
    first = core.num_steps
    while not core.is_idle:
        core.step()
        core.check()
        assert core.num_steps < first + 600, "the requests wait for each other"
    core.check_idle()
    assert not core.scheduler.encoder_cache_manager.request_cached_ids


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("first", ["offline", "online"])
def test_a_request_in_the_middle_of_an_image_gives_the_cache_to_others(
    seeing_model: Path, first: str, is_async: bool
) -> None:
    core = BareCore(seeing_model, slots=2, step_tokens=STEP_TOKENS, policy=POLICY, is_async=is_async)
    core.add(first, prompt=500, output=20, images=[LARGE])
    for _ in range(2):
        core.step()
    for _ in range(3):
        core.add(prompt=500, output=5, priority=1, images=[LARGE])
    core.add(prompt=20, output=5)
    run(core)

    assert len(core.ended) == 5


def test_vllm_encodes_only_the_images_of_the_grant(seeing_model: Path) -> None:
    core = BareCore(seeing_model, step_tokens=STEP_TOKENS, policy=POLICY)
    core.add(prompt=500, images=[range(start, start + 40) for start in range(0, 500, 50)])
    encoded = [sum(map(len, core.step().scheduled_encoder_inputs.values())) for _ in range(8)]

    assert encoded == [2, 1, 1, 2, 1, 1, 1, 1]


@pytest.mark.parametrize("seed", range(2))
def test_any_mix_of_images_is_answered(seeing_model: Path, seed: int) -> None:
    rng = Random(seed)
    core = BareCore(seeing_model, slots=4, step_tokens=STEP_TOKENS, blocks=rng.choice((150, 400)), policy=POLICY)
    outputs: dict[str, int] = {}
    for _ in range(200):
        while rng.random() < 0.15:
            output, kind = rng.randint(1, 30), rng.choice(("online", "offline"))
            starts = range(0, 450, 150)
            images = [range(start, start + rng.randint(1, 150)) for start in starts if rng.random() < 0.5]
            request_id = core.add(kind, prompt=500, output=output, images=images, priority=rng.randint(-1, 1))
            outputs[request_id] = output
        if rng.random() < 0.05 and (alive := sorted(outputs.keys() - core.ended)):
            core.abort(aborted := rng.choice(alive))
            del outputs[aborted]
        core.step()
        core.check()
    run(core)

    assert {request_id: core.answers[request_id] for request_id in outputs} == outputs


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_no_step_ends_in_an_image_that_is_computed_at_once(seeing_model: Path, seed: int, is_async: bool) -> None:
    rng = Random(seed)
    policy = POLICY | {"chunk_tokens": 48}
    core = BareCore(seeing_model, policy=policy, is_async=is_async, seed=seed, **AT_ONCE)
    images: dict[str, list[range]] = {}
    for _ in range(12):
        places = [range(start, start + rng.randint(1, 150)) for start in range(0, 450, 150) if rng.random() < 0.7]
        kind, priority = rng.choice(("online", "offline")), rng.randint(-1, 1)
        images[core.add(kind, prompt=500, output=9, images=places, priority=priority)] = places
    first = core.num_steps
    while not core.is_idle:
        requests = dict(core.scheduler.requests)
        output = core.step()
        core.check()
        assert core.num_steps < first + 600, "the requests wait for each other"
        for request_id in output.num_scheduled_tokens if output else ():
            end = requests[request_id].num_computed_tokens
            assert not any(image.start < end < image.stop for image in images[request_id])

    assert core.ended == images.keys()
    assert core.deviations.num_short == 0


@pytest.mark.parametrize("scheduler", [SyncTimed, AsyncTimed], ids=["sync", "async"])
def test_an_image_as_large_as_a_step_waits_for_no_steady_work(seeing_model: Path, scheduler: type[SyncTimed]) -> None:
    options = {"scheduler": scheduler, "is_async": scheduler.is_async, **AT_ONCE}
    policy = POLICY | {"offline_share": 0.2, "chunk_tokens": 512}
    core = BareCore(seeing_model, step_tokens=504, blocks=2000, policy=policy, **options)

    def feed() -> None:
        alive = core.made and core.scheduler.requests.keys()
        for kind, most, prompt, output in (("offline", 6, 1500, 2), ("online", 2, 50, 20)):
            for _ in range(most - sum(name.startswith(kind) for name in alive)):
                core.add(kind, prompt=prompt, output=output)
        core.step()
        core.check()

    for _ in range(5):
        feed()
    seeing = core.add(prompt=522, output=3, images=[range(512)], request_id="with an image")
    for _ in range(100):
        feed()

    assert seeing in core.ended
    assert sum(name.startswith("online") for name in core.ended) > 5
    assert sum(name.startswith("offline") for name in core.ended) > 3


@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_a_drafter_that_reads_ahead_delays_no_image(seeing_model: Path, num_ahead: int) -> None:
    core = BareCore(seeing_model, policy=POLICY, **AT_ONCE)
    core.scheduler.num_prefill_lookahead = num_ahead
    core.scheduler.driver = core.scheduler.new_driver()
    for kind in ("online", "offline"):
        core.add(kind, prompt=600, output=3, images=[range(100, 400)])

    run(core)


@pytest.mark.parametrize("seed", range(3))
def test_drafts_leave_a_step_to_a_whole_image(seeing_model: Path, seed: int) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 1}
    policy = POLICY | {"chunk_tokens": 512}
    core = BareCore(seeing_model, policy=policy, seed=seed, speculative_config=drafts, **AT_ONCE)
    for _ in range(5):
        core.add(prompt=5, output=300)
    for _ in range(5):
        core.step()
    seeing = core.add(prompt=560, output=30, images=[range(4, 516)])
    for _ in range(8):
        core.step()
        assert not 4 < core.scheduler.requests[seeing].num_computed_tokens < 516

    assert core.scheduler.requests[seeing].num_computed_tokens >= 516


def test_an_image_that_is_encoded_again_decides_the_same_answer(seeing_model: Path) -> None:
    from PIL import Image

    def ask(core: RealCore, kind: str, colors: list[str]) -> str:
        request_id = f"{kind} {colors}"
        prompt = "".join(f"{color}<image>" for color in colors)
        images = [Image.new("RGB", (80, 60), color) for color in colors]
        sampling = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0, extra_args={"ballast": {"class": kind}})
        core.engine.add_request(request_id, {"prompt": prompt, "multi_modal_data": {"image": images}}, sampling)
        return request_id

    def finish(core: RealCore) -> None:
        while core.engine.has_unfinished_requests():
            core.step()
            assert core.num_steps < 600, "the requests wait for each other"

    colors = ["red", "blue", "green", "white", "black", "gray"]
    sizes = {"slots": 2, "max_num_batched_tokens": 16, "mm_processor_cache_gb": 0, "enable_prefix_caching": False}
    with RealCore(seeing_model, policy=POLICY | {"chunk_tokens": 4}, **sizes) as core:
        for number in range(2):
            ask(core, "offline", colors[number:])
        for _ in range(6):
            core.step()
        for number in range(3):
            ask(core, "online", colors[number : number + 2])
            core.step()
        finish(core)
        with RealCore(seeing_model, policy=None, **sizes) as alone:
            for kind, number, end in [("offline", 0, 6), ("offline", 1, 6), *(("online", i, i + 2) for i in range(3))]:
                ask(alone, kind, colors[number:end])
                finish(alone)
            assert core.tokens == alone.tokens
