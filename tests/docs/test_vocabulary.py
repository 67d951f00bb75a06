"""Checks the tables of docs/reference/vocabulary.md over code, CRD, metrics, and docs."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "vocabulary.md"
PACKAGES = ("crds", "operator", "worker")
PLACES = (*PACKAGES, "benchmarks", "docs", "helm", "README.md", "CONTRIBUTING.md", "SECURITY.md", "e2e")
KINDS = {".json", ".lua", ".md", ".py", ".svg", ".tpl", ".txt", ".yaml"}
DATA = ("worker/ballast_cli/demo/model", "worker/ballast_cli/demo/traces", "docs/images/cluster.svg")


@dataclass(frozen=True)
class Entry:
    """One row of the table of words to avoid."""

    words: tuple[str, ...]
    use: str
    is_for_names: bool
    exceptions: tuple[str, ...]

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Match a word in prose, in snake_case, and in camelCase, but not inside another word."""
        forms = []
        for word in sorted(self.words, key=len, reverse=True):
            parts = re.split(r"[ _]", word)
            joined = r"[\s_-]*".join(f"[{part[0]}{part[0].upper()}]{part[1:]}" for part in parts)
            forms += [rf"(?<![A-Za-z])(?:{joined}|{word.upper()})", rf"(?<=[a-z]){parts[0][0].upper()}{joined[4:]}"]
        return re.compile(rf"(?:{'|'.join(forms)})(?![a-z])")

    def found_in(self, text: str, path: str = "") -> list[str]:
        """Return the words to avoid in a text."""
        if any("/" in exception and path.startswith(exception) for exception in self.exceptions):
            return []
        if not any(re.split(r"[ _]", word)[0].lower() in lower(text) for word in self.words):
            return []  # the pattern is slow
        for phrase in self.exceptions:
            text = text.replace(phrase, "")
        return self.pattern.findall(text)


@lru_cache(2)
def lower(text: str) -> str:
    return text.lower()


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table under a heading of the page."""
    section = PAGE.read_text().split(f"\n{heading}\n")[1].split("\n##")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@cache
def entries() -> list[Entry]:
    return [
        Entry(tuple(words.split(", ")), use, where == "names", tuple(re.findall(r"`([^`]+)`", exceptions)))
        for words, use, where, exceptions in rows("## Words to avoid")
    ]


def files() -> Iterator[Path]:
    for place in PLACES:
        path = ROOT / place
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            name = str(file.relative_to(ROOT))
            if file.suffix in KINDS and not name.startswith(DATA) and file != PAGE:
                yield file


def names_of(source: str) -> str:
    """Return the identifiers of Python source, one on each line."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return "\n".join(token.string for token in tokens if token.type == tokenize.NAME)


def violations(path: Path, text: str) -> list[str]:
    name = str(path.relative_to(ROOT))
    names = names_of(text) + f"\n{path.stem}" if path.suffix == ".py" else ""
    return [
        f"{name}: {word!r}: use {entry.use}"
        for entry in entries()
        for word in sorted(set(entry.found_in(names if entry.is_for_names else f"{path.stem}\n{text}", name)))
    ]


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.words[0])
def test_every_entry_finds_its_words_in_each_spelling(entry: Entry):
    for word in entry.words:
        snake = word.replace(" ", "_")
        camel = "".join(part.capitalize() for part in re.split(r"[ _]", word))
        assert entry.found_in(f"the {word}.")
        assert entry.found_in(f"num_{snake}_now")
        assert entry.found_in(camel)
        assert not entry.found_in(f"x{snake}y")
    for exception in entry.exceptions:
        assert not entry.found_in(f"the {exception} of", exception)


def test_a_sentence_of_todays_code_would_be_found():
    text = '"""Give the floor of the crew."""\nclass OfflineFloorMet: ...\nturn = 1\n'

    found = violations(ROOT / "operator" / "x.py", text)

    assert [line.split("'")[1] for line in found] == ["Floor", "floor", "crew", "turn"]


def test_nothing_uses_a_word_to_avoid():
    found = [line for file in files() for line in violations(file, file.read_text())]

    assert not found, "\n".join(found)


def test_a_word_of_the_vocabulary_has_one_meaning():
    terms = [
        term
        for heading in ("### Work", "### The engine", "### Sharing", "### The cluster")
        for cells in rows(heading)
        for term in cells[0].split(", ")
    ]
    avoided = {word for entry in entries() for word in entry.words if not entry.exceptions}

    assert len(terms) == len(set(terms))
    assert not avoided & set(terms)


def shared_classes(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return the public classes that several files define, each with its files."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name)
    return {name: where for name, where in found.items() if len(where) > 1}


def test_a_shared_class_would_be_found():
    assert shared_classes({"a.py": "class Plan: ...", "b.py": "class Plan: ..."}) == {"Plan": ["a.py", "b.py"]}


def test_two_classes_never_share_a_name():
    sources = {
        name: file.read_text()
        for file in files()
        if file.suffix == ".py" and (name := str(file.relative_to(ROOT))).startswith(PACKAGES)
    }
    allowed = {name.strip("`") for name, _ in rows("## Classes")}

    assert not {name: where for name, where in shared_classes(sources).items() if name not in allowed}
