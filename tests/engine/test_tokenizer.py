from __future__ import annotations

import json
import shutil
import sys
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from ballast_engine.detokenizer import Detokenizer
from ballast_engine.errors import InvalidChat, InvalidCheckpoint
from ballast_engine.tokenizer import Tokenizer
from ballast_openai.chat_limits import joined

TEXTS = ["", "Hello world", " a  b\n\nc\t", "naïve café 你好 🙂👩‍👩‍👧", "<s>x</s>", "x" * 50]
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["Hello world, the naïve café 你好 🙂 and the rest of the words"] * 3, trainer)
    return backend


def sentencepiece() -> tokenizers.Tokenizer:
    """Shaped like Llama 2: blanks as U+2581, unknown characters as bytes."""
    words = ["▁", "▁Hello", "▁world", "H", "e", "l", "o", "w", "r", "d", "▁the", "x", "the", "c", "a", "f", "."]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *words])}
    merges = [("▁", "w")] if "▁w" in vocab else []
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIAL)
    return backend


def save(directory: Path, backend: tokenizers.Tokenizer, **config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    basic = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(basic | config))
    return directory


@pytest.fixture(scope="session")
def byte_level_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("bytes"), byte_level())


@pytest.fixture(scope="session")
def sentencepiece_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("pieces"), sentencepiece())


def bos_template() -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize("has_processor", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "special": True}},
        {"bos_token": None, "add_bos_token": True},
    ],
)
def test_tokens_are_those_of_transformers(
    tmp_path: Path, make: Callable[[], tokenizers.Tokenizer], has_processor: bool, config: dict[str, Any]
) -> None:
    from transformers import AutoTokenizer

    backend = make()
    if has_processor:
        backend.post_processor = bos_template()
    directory = save(tmp_path, backend, **config)
    ours, theirs = Tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)


def added(text: str, **flags: bool) -> dict[str, Any]:
    return {"content": text, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, **flags}


PLAIN = ("<|user|>", "<|end|>")
DECODER = {"303": added("<|user|>", special=True), "304": added("<|end|>", special=True)}
ADDED: dict[str, tuple[Sequence[str], dict[str, Any], dict[str, dict[str, Any]]]] = {
    "special only in the configuration": (PLAIN, {"added_tokens_decoder": DECODER}, {}),
    "the end token is plain": (PLAIN, {"eos_token": "<|end|>"}, {}),
    "further special tokens are plain": (PLAIN, {"additional_special_tokens": PLAIN}, {}),
    "further special tokens are missing": ((), {"additional_special_tokens": PLAIN}, {}),
    "extra special tokens are missing": ((), {"extra_special_tokens": PLAIN}, {}),
    "both lists are missing": (
        (),
        {"extra_special_tokens": {"end_of_turn_token": "<|end|>"}, "additional_special_tokens": ["<|user|>"]},
        {},
    ),
    "named tokens are missing": ((), {"pad_token": "<|end|>", "unk_token": "<|user|>"}, {}),
    "rare named tokens are missing": ((), {"mask_token": "<|end|>", "sep_token": "<|user|>"}, {}),
    "a token with a name of its own": ((), {"image_token": "<|user|>"}, {}),
    "tokens only in the configuration": ((), {"added_tokens_decoder": DECODER, "eos_token": "<|end|>"}, {}),
    "tokens only in added_tokens.json": (
        (),
        {"eos_token": "<|end|>"},
        {"added_tokens.json": {"<|end|>": 304, "<|user|>": 303}},
    ),
    "the end token is a piece of words": ((), {"eos_token": "ll"}, {}),
    "an end token only in special_tokens_map.json": (
        (),
        {"eos_token": None},
        {"special_tokens_map.json": {"eos_token": "</s>"}},
    ),
}
"""Plain tokens of tokenizer.json, the fields of tokenizer_config.json, and further files."""


def save_added(directory: Path, plain: Sequence[str], config: dict[str, Any], files: dict[str, Any]) -> Path:
    backend = byte_level()
    backend.add_tokens(list(plain))
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return save(directory, backend, **config)


@pytest.mark.parametrize("where", ADDED)
def test_tokens_outside_tokenizer_json_are_those_of_transformers(tmp_path: Path, where: str) -> None:
    from transformers import AutoTokenizer

    directory = save_added(tmp_path, *ADDED[where])
    ours, theirs = Tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    tokens = theirs.encode("<|user|>Hello<|end|>")

    assert ours.encode("<|user|>Hello<|end|>") == tokens
    assert ours.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True)
    assert "".join(stream(Detokenizer(ours.token_bytes), tokens, [])) == ours.decode(tokens)
    assert (ours.eos_ids, ours.vocab_size) == ({theirs.eos_token_id}, len(theirs))


def test_an_added_token_that_cannot_get_its_id_is_refused(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"305": added("<|end|>", special=True)}}
    with pytest.raises(InvalidCheckpoint, match=r"has the id 305, but tokenizer\.json gives it 303"):
        Tokenizer(save_added(tmp_path, (), config, {}))


def test_a_token_that_was_renamed_in_tokenizer_json_keeps_its_new_name(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"303": added("<|reserved|>", special=True)}}
    tokenizer = Tokenizer(save_added(tmp_path, ["<|user|>"], config, {}))

    assert tokenizer.encode("<|user|>") == [303]
    assert tokenizer.vocab_size == 304


def test_a_llama_tokenizer_has_the_tokens_of_its_file(tmp_path: Path) -> None:
    backend = sentencepiece()
    tokenizer = Tokenizer(save(tmp_path, backend, tokenizer_class="LlamaTokenizer"))
    for text in [*TEXTS, " Hello", "<s> x"]:
        assert tokenizer.encode(text) == backend.encode(text).ids


def test_the_shipped_model_tokenizes_as_transformers_does(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer(model_dir), AutoTokenizer.from_pretrained(model_dir)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert ours.eos_ids
    assert ours.vocab_size == len(theirs)


def test_truncation_and_padding_of_the_file_do_not_touch_prompts(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=32)

    assert len(Tokenizer(save(tmp_path, backend)).encode("x y" * 20)) > 32


def test_other_threads_run_while_a_text_is_tokenized(model_dir: Path) -> None:
    tokenizer, begin, ran = Tokenizer(model_dir), threading.Event(), threading.Event()

    def run() -> None:
        begin.wait()
        ran.set()

    other = threading.Thread(target=run)
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # the other thread gets the interpreter lock only if the tokenizer releases it
    try:
        begin.set()
        for _ in range(10):
            tokenizer.encode("lorem ipsum dolor " * 10_000)
            if has_run := ran.is_set():
                break
    finally:
        sys.setswitchinterval(interval)
        other.join()

    assert has_run


CHAT = (
    "{% for m in messages %}{{ bos_token }}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("where", ["config", "named", "file"])
def test_a_chat_template_renders_as_in_transformers(tmp_path: Path, where: str) -> None:
    from transformers import AutoTokenizer

    config: dict[str, Any] = {}
    if where == "config":
        config["chat_template"] = CHAT
    if where == "named":
        config["chat_template"] = [{"name": "other", "template": "no"}, {"name": "default", "template": CHAT}]
    directory = save(tmp_path, byte_level(), **config)
    if where == "file":
        (directory / "chat_template.jinja").write_text(CHAT)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Hello 你好"}]
    theirs = AutoTokenizer.from_pretrained(directory)

    assert tokens_of(Tokenizer(directory), messages) == theirs.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


def tokens_of(tokenizer: Tokenizer, chat: list[dict[str, Any]], options: dict[str, object] | None = None) -> list[int]:
    return tokenizer.encode(tokenizer.render_chat(chat, options), is_chat=True)


def chat_of(tmp_path: Path, template: str) -> Tokenizer:
    return Tokenizer(save(tmp_path, byte_level(), chat_template=template))


def test_text_parts_are_joined_and_training_marks_are_ignored(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    tokenizer = chat_of(tmp_path, template)
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "world"}]
    chat = [{"role": "user", "content": parts}]

    assert tokenizer.decode(tokens_of(tokenizer, chat)) == "Hello\nworld"


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}", "system:a\n\nb\nc;user:hi;user:bye;"),
        ("{% for m in messages %}{{ m.role|replace('developer', 'dev') }};{% endfor %}", "user;dev;system;user;"),
    ],
)
def test_a_template_without_the_role_developer_gets_one_system_message(
    tmp_path: Path, template: str, rendered: str
) -> None:
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "developer", "content": "a"},
        {"role": "system", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "user", "content": "bye"},
    ]
    tokenizer = chat_of(tmp_path, template)

    assert tokenizer.decode(tokens_of(tokenizer, chat)) == rendered


def test_a_template_of_parts_gets_parts_and_the_result_of_a_tool_as_text(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ m.content }}{% else %}"
        "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
    )
    tokenizer = chat_of(tmp_path, template)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = [{"role": "user", "content": "hi"}, {"role": "user", "content": parts}, {"role": "tool", "content": parts}]

    assert tokenizer.decode(tokens_of(tokenizer, chat)) == "[hi][a][b]a\nb"


@pytest.mark.parametrize(
    ("template", "content", "sentence"),
    [
        (None, "hi", "has no chat template.*use /v1/completions"),
        ("{{ raise_exception('roles must alternate') }}", "hi", "roles must alternate"),
        ("{{ messages[0].content.nothing.there }}", "hi", "cannot render these messages"),
        ("{{ messages.__class__.__mro__ }}", "hi", "unsafe|cannot render"),
        (CHAT, [{"type": "image_url", "image_url": {}}], "is not text: use a string or a list of text parts"),
    ],
)
def test_a_chat_that_cannot_be_rendered_gets_a_sentence(
    tmp_path: Path, template: str | None, content: object, sentence: str
) -> None:
    tokenizer = Tokenizer(save(tmp_path, byte_level(), **({"chat_template": template} if template else {})))
    with pytest.raises(InvalidChat, match=sentence):
        tokens_of(tokenizer, [{"role": "user", "content": content}])


TOOL_CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"in": 1}}}
        ],
    },
    {"role": "tool", "content": "sunny", "tool_call_id": "call00001"},
]
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
RENDERS = {
    "a template that skips null": "{% for m in messages %}{{ m.content or '' }}" + CALLS + "{% endfor %}",
    "a template that writes every content": "{% for m in messages %}{{ m.content }}" + CALLS + "{% endfor %}",
    "a template that tests for null": "{% for m in messages %}{% if m.content is none %}"
    + CALLS
    + "{% else %}{{ m.content }}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("name", RENDERS)
def test_calls_of_tools_and_their_results_are_rendered(tmp_path: Path, name: str) -> None:
    tokenizer = chat_of(tmp_path, RENDERS[name])

    assert tokenizer.decode(tokens_of(tokenizer, TOOL_CHAT)) == 'Weather?weather{"in": 1}sunny'


@pytest.mark.parametrize(
    ("template", "chat", "sentence"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", TOOL_CHAT, "does not render tool_calls"),
        (
            "{{ messages[0].content }}" + CALLS.replace("m.", "messages[1]."),
            TOOL_CHAT,
            "does not render the role 'tool'",
        ),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", TOOL_CHAT[2:], "the role 'tool'"),
        ("{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}", TOOL_CHAT, "no tools"),
    ],
)
def test_a_template_that_drops_tools_is_refused_with_a_sentence(
    tmp_path: Path, template: str, chat: list[dict[str, Any]], sentence: str
) -> None:
    with pytest.raises(InvalidChat, match=sentence):
        tokens_of(chat_of(tmp_path, template), chat)


def test_a_template_gets_further_arguments_and_keeps_the_messages(tmp_path: Path) -> None:
    tokenizer = chat_of(tmp_path, "{{ messages[0].content }}{% if thinks %} hm{% endif %}")
    options = {"thinks": True, "messages": []}

    assert tokenizer.decode(tokens_of(tokenizer, TOOL_CHAT[:1], options)) == "Weather? hm"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content + word }}{% endfor %}",
        "{% macro all() %}{% for m in messages %}{{ word }}{% endfor %}{% endmacro %}{{ all() }}",
        "{% set text %}{% for m in messages %}{{ word }}{% endfor %}{% endset %}{{ text|length }}",
    ],
    ids=["in each message", "in a macro", "in a block"],
)
def test_a_template_that_repeats_an_argument_ends_when_its_text_is_too_long(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer(save(tmp_path, byte_level(), chat_template=template), joined)
    chat = [{"role": "user", "content": ""}] * 2000
    tokenizer.render_chat(chat[:1], {"word": "x"})
    tracemalloc.start()
    try:
        with pytest.raises(InvalidChat, match="more than 8388608 characters"):
            tokenizer.render_chat(chat, {"word": "x" * 100_000})
        assert tracemalloc.get_traced_memory()[1] < 40_000_000, "the whole text has 200 MB"
    finally:
        tracemalloc.stop()


def test_a_template_that_is_no_jinja_is_a_broken_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="cannot be compiled"):
        tokens_of(chat_of(tmp_path, "{% for %}"), [])


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{}", "is not a tokenizer"),
        ("tokenizer_config.json", "{", "is not readable JSON"),
        ("tokenizer_config.json", "[]", "contains a JSON list, expected an object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}', "the added tokens are not readable"),
        ("added_tokens.json", '{"<|end|>": "last"}', "the added tokens are not readable"),
        ("added_tokens.json", '{"<|end|>": -1}', "the added tokens are not readable"),
        ("tokenizer_config.json", '{"additional_special_tokens": 5}', "the added tokens are not readable"),
        ("tokenizer_config.json", '{"eos_token": "\\ud800"}', "the added tokens are not readable"),
        ("generation_config.json", '{"eos_token_id": "</s>"}', "is not a token id"),
    ],
)
def test_a_broken_tokenizer_file_is_named(
    tmp_path: Path, byte_level_dir: Path, name: str, content: str | None, sentence: str
) -> None:
    directory = Path(shutil.copytree(byte_level_dir, tmp_path / "copy"))
    (directory / name).unlink(missing_ok=True)
    if content is not None:
        (directory / name).write_text(content)
    with pytest.raises(InvalidCheckpoint, match=sentence):
        Tokenizer(directory)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {2}),
        ({"config.json": {"eos_token_id": 7}}, {2, 7}),
        ({"tokenizer_config.json": {"eos_token": None}, "special_tokens_map.json": {"eos_token": "</s>"}}, {2}),
        ({"config.json": {"eos_token_id": None}, "generation_config.json": {"eos_token_id": [8, 9]}}, {2, 8, 9}),
    ],
)
def test_every_place_that_names_an_end_token_counts(
    tmp_path: Path, files: dict[str, dict[str, object]], expected: set[int]
) -> None:
    directory = save(tmp_path, byte_level())
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))

    assert Tokenizer(directory).eos_ids == expected


def stream(detokenizer: Detokenizer, tokens: list[int], cuts: list[int]) -> list[str]:
    """Feed tokens in groups of the given sizes and collect the deltas."""
    deltas, at = [], 0
    for size in [*cuts, len(tokens)]:
        deltas.append(detokenizer.add(tokens[at : at + size]))
        at += size
    return [*deltas, detokenizer.end()]


@settings(max_examples=300)
@given(data=st.data())
def test_streamed_byte_level_text_is_the_decoded_text(byte_level_dir: Path, data: st.DataObject) -> None:
    tokenizer = Tokenizer(byte_level_dir)
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    cuts = data.draw(st.lists(st.integers(0, 3), max_size=20))

    assert "".join(stream(Detokenizer(tokenizer.token_bytes), tokens, cuts)) == tokenizer.decode(tokens)


@settings(max_examples=300)
@given(text=st.text(max_size=30), cuts=st.lists(st.integers(0, 3), max_size=20))
@pytest.mark.parametrize("kind", ["byte_level_dir", "sentencepiece_dir"])
def test_no_delta_holds_half_a_character(request: pytest.FixtureRequest, kind: str, text: str, cuts: list[int]) -> None:
    tokenizer = Tokenizer(request.getfixturevalue(kind))
    tokens = tokenizer.encode(text)
    deltas = stream(Detokenizer(tokenizer.token_bytes), tokens, cuts)

    assert "".join(deltas) == tokenizer.decode(tokens)
    assert all("\ufffd" not in delta for delta in deltas) or "\ufffd" in text


@pytest.mark.parametrize(("prompt", "expected"), [([], "Hello world"), ([1], "Hello world"), ([262], " Hello world")])
def test_a_leading_blank_stays_behind_a_prompt_with_text(
    sentencepiece_dir: Path, prompt: list[int], expected: str
) -> None:
    tokenizer = Tokenizer(sentencepiece_dir)
    backend = tokenizers.Tokenizer.from_file(str(sentencepiece_dir / "tokenizer.json"))
    tokens = [backend.token_to_id("▁Hello"), backend.token_to_id("▁world")]
    detokenizer = Detokenizer(tokenizer.token_bytes, prompt=prompt)

    assert detokenizer.add([token for token in tokens if token is not None]) + detokenizer.end() == expected


def test_a_decoder_of_another_kind_is_asked_token_by_token(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "ab": 1, "cd": 2}, unk_token="<unk>"))
    tokenizer = Tokenizer(save(tmp_path, backend, bos_token=None, eos_token=None))

    assert "".join(stream(Detokenizer(tokenizer.token_bytes), [1, 2], [1])) == "abcd"


def cut_at_first_complete_stop(text: str, stops: list[str], keep: bool) -> str:
    """The definition, character by character."""
    for end in range(len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[:end] if keep else text[: min(begins)]
    return text


@settings(max_examples=500)
@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 3), max_size=20),
    keep=st.booleans(),
)
def test_stop_strings_cut_the_same_however_tokens_arrive(
    byte_level_dir: Path, text: str, stops: list[str], cuts: list[int], keep: bool
) -> None:
    tokenizer = Tokenizer(byte_level_dir)
    tokens = [tokenizer.encode(character)[0] for character in text]
    detokenizer = Detokenizer(tokenizer.token_bytes, stop=stops, keep_stop=keep)
    deltas = stream(detokenizer, tokens, cuts)

    assert "".join(deltas) == cut_at_first_complete_stop(text, stops, keep)
    assert detokenizer.is_stopped == any(stop in text for stop in stops)


def test_text_that_may_become_a_stop_string_is_held_back(byte_level_dir: Path) -> None:
    tokenizer = Tokenizer(byte_level_dir)
    detokenizer = Detokenizer(tokenizer.token_bytes, stop=["END"])
    ids = {character: tokenizer.encode(character)[0] for character in "xEND"}

    assert [detokenizer.add([ids[c]]) for c in "xENEx"] == ["x", "", "", "EN", "Ex"]
