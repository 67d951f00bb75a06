"""A request without sampling parameters has those that the model suggests, over HTTP as in a job."""

from __future__ import annotations

import json
import shutil

from queue_objects import RecordingEngine, make_line

from ballast_worker.suggested_sampling import suggested_sampling

SUGGESTED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05}


def take_sampling(engine: RecordingEngine) -> list[dict[str, float]]:
    """Return the suggested parameters of the requests since the last call, with their seed."""
    found = [request.sampling for request in engine.requests]
    engine.requests.clear()
    return [{name: getattr(one, name) for name in (*SUGGESTED, "seed")} for one in found]


def test_a_body_without_sampling_parameters_has_those_of_the_model(
    *, serve, make_config, model_dir, valkey, queue, queue_name, eventually, tmp_path
) -> None:
    directory = shutil.copytree(model_dir, tmp_path / "model")
    (directory / "generation_config.json").write_text(json.dumps({**SUGGESTED, "eos_token_id": 0, "do_sample": False}))
    config = make_config(model={"uri": str(directory)}, offline={"queue": queue_name}, runtime={"redisUrl": valkey.url})
    bodies = [{}, {"temperature": None, "seed": -1}, {"temperature": 0, "top_k": -1, "seed": 5}]
    with serve(config, build=RecordingEngine) as serving, serving.client() as client:
        engine = serving.worker.engine
        for body in bodies:
            client.post("/v1/completions", json={"model": "tiny", "prompt": "Hi", "max_tokens": 1, **body})
        online = take_sampling(engine)
        lines = [
            json.dumps({**json.loads(line), "body": {"model": "tiny", "prompt": "Hi", "max_tokens": 1, **body}})
            for line, body in zip(map(make_line, range(3)), bodies, strict=True)
        ]
        job_id = queue.submissions.submit(lines).job_id
        eventually(lambda: queue.jobs.get(job_id).state.is_over, "the job to be over")
        items = sorted(take_sampling(engine), key=lambda one: one["seed"] == 5)

    for asked in (online, items):
        assert asked[0] == {**SUGGESTED, "seed": asked[0]["seed"]}
        assert asked[1] == {**SUGGESTED, "seed": asked[1]["seed"]}
        assert asked[2] == {**SUGGESTED, "temperature": 0, "top_k": 0, "seed": 5}
        assert len({one["seed"] for one in asked} | {2**64 - 1}) == 4, "a seed of -1 is none"


def test_parameters_are_logged_with_those_that_the_engine_cannot_apply(tmp_path, caplog) -> None:
    file = tmp_path / "generation_config.json"
    caplog.set_level("INFO")
    given = {"repetition_penalty": 1.1, "frequency_penalty": 0.0, "max_new_tokens": 9, "top_k": 1, "top_p": 1.5}
    file.write_text(json.dumps(given))

    assert suggested_sampling(file) == {"top_k": 1}
    applied, ignored = caplog.records
    assert ("are in force" in applied.message, applied.fields) == (True, {"top_k": 1})
    assert ("are ignored" in ignored.message, ignored.levelname) == (True, "WARNING")
    assert ignored.fields == {"repetition_penalty": 1.1, "max_new_tokens": 9, "top_p": 1.5}


def test_a_model_without_suggestions_has_none(tmp_path, caplog) -> None:
    caplog.set_level("INFO")
    assert suggested_sampling(tmp_path / "generation_config.json") == {}
    assert not caplog.records
