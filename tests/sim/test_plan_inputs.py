"""The YAML file of the planner: whatever is in it, it is read as it was meant or refused with a sentence."""

from __future__ import annotations

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ballast_api.errors import InvalidConfig
from ballast_sim.errors import BadInput
from ballast_sim.planner.inputs import GpuInput, PlanInputs
from ballast_sim.replay.hardware import GPUS

NAMES = st.sampled_from(["a100", "h100", "mine", "llama-3-8b", "bge-base", "fp8", "cheapest", "", "no", "1e3", "# a"])
NUMBERS = st.one_of(st.integers(-3, 300), st.floats(allow_nan=True, allow_infinity=True), st.just(10**400))
LEAVES = st.one_of(NAMES, NUMBERS, st.none(), st.booleans(), st.dates(), st.binary(max_size=3), st.text(max_size=5))


def keys(model, found=()):
    """All names that the file knows, at any depth."""
    names = [field.alias for field in model.model_fields.values()]
    for field in model.model_fields.values():
        inner = field.annotation
        for part in (inner, *getattr(inner, "__args__", ())):
            if hasattr(part, "model_fields") and part not in found:
                names += keys(part, (*found, part))
    return sorted(set(names))


DOCUMENTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(keys(PlanInputs)), LEAVES), inner, max_size=5),
    ),
    max_leaves=12,
)


def load(path, text):
    """What comes of a file: inputs and how they are written, or a refusal."""
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        inputs = PlanInputs.load(path)
        return inputs, inputs.dump()
    except (InvalidConfig, BadInput):
        return None, ""


@given(document=st.dictionaries(st.sampled_from([f.alias for f in PlanInputs.model_fields.values()]), DOCUMENTS))
@example(document={"seed": 3, "gpus": {"mine": {}}})
@example(document={"ahead": {"services": [{"name": "a", "model": "b", "requestsPerSecond": [1, float("inf")]}]}})
def test_any_document_is_read_or_refused_with_a_sentence(tmp_path_factory, document):
    path = tmp_path_factory.getbasetemp() / "plan.yaml"

    inputs, dumped = load(path, yaml.safe_dump(document, allow_unicode=True))

    if inputs is not None:
        again, _ = load(path, dumped)
        assert again is not None
        assert again.dump() == dumped


@settings(max_examples=50)
@given(text=st.text(max_size=40))
@example(text="a: 2026-13-45")
@example(text="[" * 3000)
@example(text="&a [*a]")
@example(text="1: {}")
@example(text="? {}: 1")
def test_any_text_is_read_or_refused_with_a_sentence(tmp_path_factory, text):
    load(tmp_path_factory.getbasetemp() / "text.yaml", text)


@settings(max_examples=30)
@given(
    numbers=st.fixed_dictionaries(
        {
            "slo": st.fixed_dictionaries({}, optional={"tpotMilliseconds": st.floats(1e-9, 1e9)}),
            "seed": st.integers(-(10**9), 10**9),
            "trafficMinutes": st.floats(1e-6, 240),
            "gpus": st.dictionaries(
                st.sampled_from(["a100", "l4"]),
                st.fixed_dictionaries({}, optional={"watts": st.floats(1e-9, 1e9), "teraflops": st.floats(1e-9, 1e9)}),
            ),
        }
    )
)
def test_inputs_that_are_written_and_read_are_the_same(tmp_path_factory, numbers):
    path = tmp_path_factory.getbasetemp() / "numbers.yaml"
    inputs = PlanInputs.model_validate(numbers)

    again, dumped = load(path, inputs.dump())

    assert again.model_copy(update={"gpus": {}}) == inputs.model_copy(update={"gpus": {}})
    assert load(path, dumped) == (again, dumped)
    assert all(line.isascii() for line in dumped.splitlines())


def test_every_figure_of_the_worksheet_is_one_that_the_file_takes():
    written = yaml.safe_load(PlanInputs().dump())
    again = PlanInputs.model_validate(written)

    assert set(written) == {field.alias for field in PlanInputs.model_fields.values()}
    assert again.model_copy(update={"gpus": {}}) == PlanInputs()
    assert "budgetKilowatts: null" in PlanInputs().dump()
    assert all(GpuInput.describing(again.find_gpu(name)) == GpuInput.describing(gpu) for name, gpu in GPUS.items())


def test_figures_that_are_not_set_do_not_take_the_place_of_the_load_of_a_trace(tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "fleet.yaml"

    for fleet, is_set in (({}, False), ({"onlineGpus": 8}, True), ({"offlineTokensPerSecond": 9}, False)):
        again, dumped = load(path, PlanInputs.model_validate({"fleet": fleet}).dump())

        assert again.fleet.has_online_load == is_set
        assert again.fleet.offline_tokens_per_second == fleet.get("offlineTokensPerSecond")
        assert ("  # onlineGpus: 8" in dumped) != is_set
