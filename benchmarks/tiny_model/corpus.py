r"""The corpus of the tiny model: prose-rich documents of the Python 3.11 documentation, in their RST sources.

The corpus is one compressed text file, ``corpus.txt.xz``. Every document in it starts with one header line, the ASCII
record separator (``\x1e``) followed by the document's name, and ends where the next header starts. Whole documents are
held out, in the order of a hash of their names, so that the split is the same everywhere and owes nothing to the texts.

Examples:
  python corpus.py                             # describe the corpus that is in the repository
  python corpus.py --docs /usr/share/doc/python3.11/html/_sources   # assemble it again from the documentation
"""

import argparse
import hashlib
import lzma
import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
CORPUS_PATH = HERE / "corpus.txt.xz"
LICENSE_PATH = HERE / "LICENSE-corpus.txt"

# The C API reference and the distutils documents are left out: they are mostly signatures, or repeat other documents.
DIRECTORIES = ("extending", "faq", "howto", "library", "reference", "tutorial", "using", "whatsnew")
SUFFIX = ".rst.txt"
MIN_PROSE_SHARE = 0.45
HELD_OUT_SHARE = 0.05
RECORD_SEPARATOR = "\x1e"
# How long a text has to recur, in bytes, to count as copied between the two sides of the split.
OVERLAP_BYTES = 64

_NOT_PROSE = re.compile(r"\.\. |>>>|\||\+[-=]|:\w+:|[=\-~*^#]{3}")
_LOWER_CASE_WORD = re.compile(r"\b[a-z]{2,} ?")


@dataclass(frozen=True)
class Document:
    """One document of the corpus.

    Attributes:
      name: Its path below the documentation's source directory, without the suffix, as in ``library/json``.
      text: Its RST source.
    """

    name: str
    text: str

    @property
    def size(self) -> int:
        """Length of the text in UTF-8 bytes."""
        return len(self.text.encode())


def prose_share(text: str) -> float:
    """Returns the share of characters, from 0 to 1, in paragraphs that consist mainly of lower-case words."""
    prose = 0
    for paragraph in map(str.strip, re.split(r"\n\s*\n", text)):
        words = sum(map(len, _LOWER_CASE_WORD.findall(paragraph)))
        if words > 0.7 * len(paragraph) and not _NOT_PROSE.match(paragraph):
            prose += len(paragraph)
    return prose / max(1, len(text))


def assemble(docs: Path) -> list[Document]:
    """Reads the documents that belong to the corpus, in order of their names.

    Args:
      docs: The ``_sources`` directory of the built HTML documentation.
    """
    documents = []
    for directory in DIRECTORIES:
        for path in sorted((docs / directory).rglob("*" + SUFFIX)):
            text = path.read_text(encoding="utf-8")
            if prose_share(text) >= MIN_PROSE_SHARE:
                documents.append(Document(path.relative_to(docs).as_posix().removesuffix(SUFFIX), text))
    if not documents:
        raise SystemExit(f"no document to keep below {docs}: is it the _sources directory of the documentation?")
    return documents


def save(documents: list[Document], path: Path = CORPUS_PATH) -> None:
    """Writes the corpus file."""
    for document in documents:
        if RECORD_SEPARATOR in document.text:
            raise ValueError(f"{document.name} contains the character that separates documents")
    text = "".join(f"{RECORD_SEPARATOR}{document.name}\n{document.text}" for document in documents)
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def load(path: Path = CORPUS_PATH) -> list[Document]:
    """Reads the corpus file."""
    text = lzma.decompress(path.read_bytes()).decode()
    return [Document(*record.split("\n", 1)) for record in text.split(RECORD_SEPARATOR)[1:]]


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Divides the documents into the training split and the held-out split, ``HELD_OUT_SHARE`` of the bytes or more."""
    missing = HELD_OUT_SHARE * sum(document.size for document in documents)
    held_out = set()
    for document in sorted(documents, key=lambda d: hashlib.sha256(d.name.encode()).digest()):
        if missing <= 0:
            break
        held_out.add(document.name)
        missing -= document.size
    return [d for d in documents if d.name not in held_out], [d for d in documents if d.name in held_out]


def overlap(training: list[Document], held_out: list[Document]) -> float:
    """Returns the share of held-out bytes, from 0 to 1, that lie in a copied stretch of ``OVERLAP_BYTES`` or more."""
    seen = set()
    for document in training:
        data = document.text.encode()
        seen.update(hash(data[i : i + OVERLAP_BYTES]) for i in range(len(data) - OVERLAP_BYTES + 1))
    copied = total = 0
    for document in held_out:
        data = document.text.encode()
        total += len(data)
        covered_to = 0
        for start in range(len(data) - OVERLAP_BYTES + 1):
            if hash(data[start : start + OVERLAP_BYTES]) in seen:
                copied += start + OVERLAP_BYTES - max(start, covered_to)
                covered_to = start + OVERLAP_BYTES
    return copied / total


def license_notice(docs: Path) -> str:
    """Builds the licence notice of the corpus from the documentation's own pages."""
    source = (docs / f"license{SUFFIX}").read_text(encoding="utf-8").replace("|release|", "3.11")
    psf = source[source.index("PSF LICENSE AGREEMENT FOR") : source.index("BEOPEN.COM LICENSE AGREEMENT")]
    zero_bsd = source[source.index("ZERO-CLAUSE BSD LICENSE") : source.index(".. _OtherLicenses:")]
    copyright_page = (docs / f"copyright{SUFFIX}").read_text(encoding="utf-8")
    copyrights = copyright_page[copyright_page.index("Copyright ©") : copyright_page.index("-------")]
    body = (psf + zero_bsd).replace(".. parsed-literal::\n\n", "")
    return (
        "corpus.txt.xz is taken from the documentation of Python 3.11 (https://docs.python.org/3.11/).\n\n"
        f"{copyrights.strip()}\n\n"
        "Summary of changes: a selection of the documentation's RST source files was joined into one compressed\n"
        "file, each under a header line with its name. The texts themselves are unchanged.\n\n"
        "The documentation is under the PSF License Agreement; the examples, recipes and other code in it are also\n"
        "under the Zero-Clause BSD License. Both follow.\n\n\n"
        f"{body.strip()}\n"
    )


def main() -> None:
    """Assembles the corpus if asked to, and describes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, help="assemble the corpus again from this _sources directory")
    arguments = parser.parse_args()
    if arguments.docs:
        save(assemble(arguments.docs))
        LICENSE_PATH.write_text(license_notice(arguments.docs), encoding="utf-8")
    training, held_out = split(load())
    print(f"{CORPUS_PATH.name}: {CORPUS_PATH.stat().st_size:,} bytes")
    print(f"training: {len(training)} documents, {sum(d.size for d in training):,} bytes")
    print(f"held out: {len(held_out)} documents, {sum(d.size for d in held_out):,} bytes")
    for document in held_out:
        print(f"  {document.name}: {document.size:,} bytes")
    shared = overlap(training, held_out)
    print(f"held-out bytes in stretches of {OVERLAP_BYTES} or more that training has too: {shared:.1%}")


if __name__ == "__main__":
    main()
