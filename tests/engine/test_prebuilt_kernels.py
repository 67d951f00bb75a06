"""An installation with prebuilt kernels needs no compiler. The kernels of each processor compute the same answers."""

from __future__ import annotations

import platform

import numpy as np
import pytest
import torch
from batches import Part, logits_of, make_batch

from ballast_engine.executor import Executor
from ballast_engine.loader import load
from ballast_engine.native import compiler, library, prebuilt
from ballast_engine.native.instruction_sets import INSTRUCTION_SETS, supported
from ballast_engine.request import SamplingParams

MACHINE, CPUINFO = platform.machine(), compiler.cpuinfo()
HERE = supported(MACHINE, CPUINFO)
GREEDY = SamplingParams(temperature=0.0)
BLOCK_TOKENS = 8


def described(features):
    """A /proc/cpuinfo of two processors."""
    flags = f"flags\t\t: fpu {' '.join(features)} zzz"
    return f"processor\t: 0\nmodel name\t: any\n{flags}\nbugs\t\t: avx512f\n\nprocessor\t: 1\n{flags}\n"


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ((), ("x86-64-v4", "x86-64-v3", "x86-64-v2")),
        (("avx512vl",), ("x86-64-v3", "x86-64-v2")),
        (("avx512f",), ("x86-64-v3", "x86-64-v2")),
        (("fma",), ("x86-64-v2",)),
        (("sse4_2",), ()),
    ],
)
def test_a_processor_without_a_feature_gets_kernels_that_do_not_need_it(missing, expected):
    features = INSTRUCTION_SETS["x86_64"]["x86-64-v4"].difference(missing)

    assert supported("x86_64", described(features)) == expected


def test_other_machines_get_their_own_kernels_or_none():
    assert supported("aarch64", "processor\t: 0\nFeatures\t: fp asimd evtstrm\nCPU part\t: 0xd0c\n") == ("armv8-a",)
    assert supported("riscv64", described(INSTRUCTION_SETS["x86_64"]["x86-64-v4"])) == ()
    assert supported("x86_64", "") == ()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The kernels for every instruction set of this processor. It takes 20 seconds."""
    return dict(zip(HERE, prebuilt.build(tmp_path_factory.mktemp("prebuilt"), HERE), strict=True))


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The folder of the prebuilt kernels, empty, on a machine without a compiler."""
    monkeypatch.setenv("CC", "/nowhere/cc")
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    library.kernels.cache_clear()
    yield tmp_path
    library.kernels.cache_clear()


@pytest.fixture(params=HERE)
def only(request, installed, built):
    """The kernels for one instruction set, and no others."""
    path = installed / built[request.param].name
    path.symlink_to(built[request.param])
    return path


@pytest.mark.slow
def test_the_fastest_kernels_of_the_folder_are_chosen(built, installed):
    for name in reversed(HERE):
        path = installed / built[name].name
        path.symlink_to(built[name])
        assert prebuilt.find(installed, MACHINE, CPUINFO) == path


@pytest.mark.slow
def test_kernels_from_other_sources_are_not_used(only, installed, monkeypatch):
    assert prebuilt.find(installed, MACHINE, CPUINFO) == only
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-DCHANGED"))  # part of the digest

    assert prebuilt.find(installed, MACHINE, CPUINFO) is None


@pytest.mark.slow
def test_prebuilt_kernels_need_no_compiler(only, checkpoints, caplog):
    caplog.set_level("INFO")

    assert load(checkpoints("llama")[0], attention="auto", threads=1).attention == "cpu"
    [record] = [record for record in caplog.records if record.message.startswith("kernels loaded")]
    assert record.fields["path"] == only


def test_without_prebuilt_kernels_and_a_compiler_the_message_names_both(installed):
    with pytest.raises(compiler.NoCompiler, match=r"no prebuilt kernels for this processor, and no C compiler"):
        library.kernels()


def executor_of(directory, attention):
    loaded = load(directory, dtype="float32", attention=attention, threads=1)
    return Executor(loaded, num_blocks=64, block_tokens=BLOCK_TOKENS)


@pytest.mark.slow
@pytest.mark.usefixtures("only")
@pytest.mark.parametrize("model", ["llama", "mistral, sliding window", "qwen2", "qwen3"])
def test_the_answers_are_the_same_with_the_kernels_of_each_instruction_set(model, checkpoints):
    prompt = np.random.default_rng(1).integers(3, 193, 77).tolist()
    blocks = np.random.default_rng(2).permutation(64)[:10].tolist()
    chunks = [
        make_batch([Part(prompt[start:end], start, blocks, sampling=GREEDY, every_row=True)], BLOCK_TOKENS)
        for start, end in ((0, 33), (33, 77))
    ]
    executors = [executor_of(checkpoints(model)[0], attention) for attention in ("cpu", "sdpa")]
    ours, reference = (torch.cat([logits_of(executor, batch).clone() for batch in chunks]) for executor in executors)

    torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours.argmax(-1), reference.argmax(-1))


@pytest.mark.slow
@pytest.mark.usefixtures("only")
def test_the_answers_of_each_instruction_set_do_not_depend_on_the_batch(checkpoints):
    executor = executor_of(checkpoints("llama")[0], "cpu")
    prompts = [np.random.default_rng(length).integers(3, 193, length).tolist() for length in (40, 25)]
    parts = [Part(prompt, 0, list(range(8 * i, 8 * i + 8)), sampling=GREEDY) for i, prompt in enumerate(prompts)]
    together = logits_of(executor, make_batch(parts, BLOCK_TOKENS)).clone()
    alone = [logits_of(executor, make_batch([one], BLOCK_TOKENS)).clone() for one in parts]

    assert torch.equal(together, torch.cat(alone))
