"""LoRA adapters: online requests and items name them, and each tenant has its own."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
from small_models import config_of, make_adapter

from ballast_cli.explain import scene
from ballast_queue.redis_store import Queue
from ballast_vllm.engine_client import PROMPT_LOGPROBS
from ballast_worker.waiting_reasons import why

pytestmark = pytest.mark.timeout(900)

QUEUE = "test/adapters"
NAMES = ("m", "a", "b", "c")
ALIAS = "org/m"


@pytest.fixture(scope="module")
def config(wandering_model, valkey, tmp_path_factory):
    """A model with an alias, and three adapters, of which `b` belongs to the tenant `legal`."""
    folder = tmp_path_factory.mktemp("adapters")
    adapters = [
        {"name": name, "uri": f"file://{make_adapter(folder / name, wandering_model, seed=seed)}"}
        for seed, name in enumerate("abc")
    ]
    adapters[1]["tenants"] = ["legal"]
    sections = {
        "model": {"adapters": adapters, "aliases": [ALIAS]},
        "offline": {"queue": QUEUE},
        "runtime": {"redisUrl": valkey.url},
    }
    return config_of(wandering_model, slots=5, **sections)


@pytest.fixture(scope="module")
def serving(launch, config, tmp_path_factory):
    with launch(tmp_path_factory.mktemp("configuration") / "worker.yaml", config) as found:
        yield found


def ask(serving, model, tenant, **more):
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, **more}
    with serving.client(headers={"x-llm-d-inference-fairness-id": tenant}) as client:
        return client.post("/v1/completions", json=body)


@pytest.fixture(scope="module")
def texts(serving):
    """The online answer of each model."""
    return {model: ask(serving, model, "legal").json()["choices"][0]["text"] for model in NAMES}


@pytest.mark.parametrize(
    "more", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}, {"n": 2, "prompt_logprobs": 0}]
)
def test_logprobs_of_a_prompt_are_refused_because_vllm_would_end(serving, more):
    refused = ask(serving, "m", "legal", **{"temperature": 0.5, **more})

    assert refused.status_code == 400
    assert PROMPT_LOGPROBS in refused.json()["error"]["message"]
    assert ask(serving, "m", "legal").status_code == 200
    assert serving.series()['ballast_requests_waiting{class="online"}'] == 0


@pytest.fixture
def run(run_job, as_line):
    """`run(models, tenant)` runs a job with an item for each model, and returns the results in order."""

    def ran(models, tenant, queue_name=QUEUE):
        body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        lines = [as_line(str(n), "/v1/completions", **{**body, "model": model}) for n, model in enumerate(models)]
        found = run_job(queue_name, lines, tenant=tenant)
        return [found[str(n)] for n in range(len(models))]

    return ran


def test_each_adapter_answers_by_its_name_for_its_tenants(serving, texts):
    with serving.client() as client:
        listed = {model["id"] for model in client.get("/v1/models").json()["data"]}
    refused = ask(serving, "b", "research")

    assert listed == {*NAMES, ALIAS}
    assert len(set(texts.values())) == len(NAMES)
    assert ask(serving, "a", "research").json()["choices"][0]["text"] == texts["a"]
    assert refused.status_code == 404
    assert refused.json()["error"]["message"].startswith("The model `b` does not exist")


def test_an_alias_is_answered_under_the_name_of_the_model_and_makes_no_series(serving, run, texts):
    answers = [ask(serving, ALIAS, "research").json(), run((ALIAS,), "research")[0].body]

    assert [(each["model"], each["choices"][0]["text"]) for each in answers] == [("m", texts["m"])] * 2
    assert {label for name in serving.series() for label in re.findall('model_name="(.*?)"', name)} == {"m"}


def test_items_of_the_model_and_of_adapters_in_the_same_steps_have_the_online_answers(run, texts):
    models = NAMES * 8

    results = run(models, "legal")

    assert [result.body["choices"][0]["text"] for result in results] == [texts[model] for model in models]
    assert [result.body["model"] for result in results] == [*models]


def test_online_requests_of_the_model_and_of_adapters_in_the_same_steps_have_their_own_answers(serving, texts):
    models = NAMES * 8

    with ThreadPoolExecutor(len(models)) as threads:
        answers = [*threads.map(lambda name: ask(serving, name, "legal").json(), models)]

    assert [answer["choices"][0]["text"] for answer in answers] == [texts[model] for model in models]


def test_an_item_with_the_adapter_of_another_tenant_is_a_dead_letter(run, texts):
    own, foreign = run(("a", "b"), "research")

    assert own.body["choices"][0]["text"] == texts["a"]
    assert foreign.status_code == 404
    assert foreign.error["message"].startswith("The model `b` does not exist")


@pytest.fixture
def options(config):
    """The arguments of `vllm serve` for one adapter at a time, and those for its adapters."""
    adapters = [{"name": found["name"], "path": found["uri"][7:]} for found in config["model"]["adapters"]]
    model = config["model"]["uri"][7:]
    return (model, "--enable-lora", "--max-loras=1", "--max-lora-rank=8"), adapters


@pytest.fixture
def serving_one_at_a_time(start, options, eventually, valkey):
    """`with serving_one_at_a_time(queue_name)` runs a server that loads more adapters than it has places.

    It loads them while it runs. On a CPU, Ballast would refuse to start with them.
    """
    arguments, adapters = options

    @contextmanager
    def started(queue_name):
        variables = {"BALLAST_RUNTIME_REDIS_URL": valkey.url, "BALLAST_OFFLINE_QUEUE": queue_name}
        with start(*arguments, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1", **variables) as serving:
            with serving.client() as client:
                for each in adapters:
                    body = {"lora_name": each["name"], "lora_path": each["path"]}
                    client.post("/v1/load_lora_adapter", json=body).raise_for_status()
            with closing(Queue.connect(valkey.url, queue_name)) as queue:
                eventually(lambda: {*"abc"} <= {*queue.settings.read().models}, "the queue to learn of them")
            yield serving

    return started


def test_a_cpu_without_an_empty_place_for_adapters_is_refused(start, options):
    arguments, adapters = options

    with start(*arguments, "--lora-modules", *map(json.dumps, adapters), is_awaited=False) as serving:
        code = serving.process.wait(600)

    assert code != 0
    assert "vLLM has 3 LoRA adapters and --max-loras=1." in serving.log.read_text()
    assert "Set --max-loras=4\n" in serving.log.read_text()


def test_items_of_more_adapters_than_a_step_computes_are_all_answered(serving_one_at_a_time, run, texts):
    queue_name, models = f"{QUEUE}-one-at-a-time", ("a", "b", "c") * 8

    with serving_one_at_a_time(queue_name):
        results = run(models, "legal", queue_name)

    assert [result.body["choices"][0]["text"] for result in results] == [texts[model] for model in models]


def test_items_run_behind_those_whose_adapter_gets_no_place(serving_one_at_a_time, as_line, eventually, valkey):
    queue_name, is_over = f"{QUEUE}-held-up", threading.Event()

    def ask_on(serving, length):
        while not is_over.is_set():
            ask(serving, "a", "legal", max_tokens=length, ignore_eos=True)

    def lines(*models):
        body = {"prompt": "Once upon a time", "max_tokens": 8}
        return [as_line(str(n), "/v1/completions", **body, model=name) for n, name in enumerate(models)]

    with (
        serving_one_at_a_time(queue_name) as serving,
        closing(Queue.connect(valkey.url, queue_name)) as queue,
        ThreadPoolExecutor(3) as threads,
    ):
        try:
            for length in (260, 330, 400):  # so that one of them runs at any time
                threads.submit(ask_on, serving, length)
            place = 'ballast_slots{class="online",state="running"}'
            eventually(lambda: serving.series()[place] == 3, "the adapter to have its place")
            jobs = [queue.submissions.submit(each).job_id for each in (lines(*"b" * 40), lines("m"), lines("a"))]
            first, *others = jobs
            eventually(lambda: all(queue.jobs.get(job_id).state.is_over for job_id in others), "the others to be over")
            waiting = queue.jobs.get(first).counts.waiting
            eventually(lambda: queue.workers.statuses()[0].offline.held_up, "the status to count the items held up")
            said = why(queue.jobs.get(first), scene(queue))
        finally:
            is_over.set()
        eventually(lambda: queue.jobs.get(first).counts.succeeded == 40, "the items to run after the online requests")

    assert waiting > 20
    assert any("Online requests of other adapters hold all places" in sentence for sentence in said), said
    assert not any("SLO" in sentence for sentence in said), said
