"""Write the reference documentation from the code, or check that it is what the code says.

python docs/generate.py            write
python docs/generate.py --check    fail, and name the files, where one differs
"""

from __future__ import annotations

import argparse
import html
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ballast_api.worker_config import WorkerConfig

REFERENCE = Path(__file__).parent / "reference"
NOTE = "<!-- Written by `make generate`; edit the code it describes. -->\n\n"


def kind_of(schema: dict[str, Any]) -> str:
    """A field's type in words, with its bounds."""
    if "anyOf" in schema:
        return " or ".join(kind_of(option) for option in schema["anyOf"] if option.get("type") != "null")
    if "enum" in schema:
        return " \\| ".join(f"`{value}`" for value in schema["enum"])
    if "$ref" in schema:
        return schema["$ref"].rsplit("/", 1)[1]
    kind = schema.get("type", "any")
    if kind == "array":
        kind = f"list of {kind_of(schema['items'])}"
    bounds = [
        f"{sign} {schema[key]:g}"
        for key, sign in (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
        if key in schema
    ]
    return f"{kind} ({', '.join(bounds)})" if bounds else kind


def default_of(schema: dict[str, Any], *, is_required: bool) -> str:
    """A field's default as YAML shows it."""
    if is_required:
        return "required"
    default = schema.get("default")
    return "" if default in (None, [], "") or isinstance(default, dict) else f"`{default}`"


def section(name: str, schema: dict[str, Any], definitions: dict[str, Any]) -> Iterator[str]:
    """The table of one section, then those of the sections inside it."""
    yield f"## {name}\n\n{schema.get('description', '').strip()}\n"
    yield "| field | type | default | meaning |\n|---|---|---|---|"
    nested: list[tuple[str, str]] = []
    for field, spec in schema["properties"].items():
        text = " ".join(spec.get("description", "").split()).replace("|", "\\|")
        yield (
            f"| `{field}` | {kind_of(spec)} | {default_of(spec, is_required=field in schema.get('required', ()))} "
            f"| {text} |"
        )
        ref = spec.get("$ref") or spec.get("items", {}).get("$ref")
        if ref:
            nested.append((field, ref.rsplit("/", 1)[1]))
    yield ""
    for field, definition in nested:
        prefix = "" if name == "WorkerConfig" else f"{name}."
        yield from section(f"{prefix}{field}", definitions[definition], definitions)


def configuration() -> str:
    """The reference of the worker's configuration file."""
    schema = WorkerConfig.model_json_schema(by_alias=True)
    lines = section("WorkerConfig", schema, schema["$defs"])
    return "# Configuration of a worker\n\n" + NOTE + "\n".join(lines)


def commands() -> str:
    """The reference of the `ballast` command, from its own help."""
    command = [sys.executable, "-m", "typer", "ballast_cli.app", "utils", "docs", "--name", "ballast"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    text = html.unescape(text.split("\n", 1)[1])
    text = re.sub(r"\nExamples:\n((?:  .*\n?)+)", r"\n**Examples**:\n\n```sh\n\1```\n", text)
    return "# The ballast command\n\n" + NOTE + re.sub(r"(?m)^  ballast", "ballast", text).lstrip()


def pages() -> dict[Path, str]:
    """Every generated page with its text."""
    return {REFERENCE / "configuration.md": configuration(), REFERENCE / "commands.md": commands()}


def main() -> int:
    """Write or check; the exit status is 1 where a page differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail where a page differs")
    check = parser.parse_args().check
    stale = []
    for path, text in pages().items():
        wanted = text.rstrip("\n") + "\n"
        if path.exists() and path.read_text(encoding="utf-8") == wanted:
            continue
        stale.append(path)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted, encoding="utf-8")
            print(f"wrote {path}")
    known = set(pages())
    unknown = [path for path in REFERENCE.glob("*.md") if path not in known]
    for path in stale if check else []:
        print(f"{path} is not what the code says: run `make generate`", file=sys.stderr)
    for path in unknown:
        print(f"{path} is written by nobody: remove it or add it to docs/generate.py", file=sys.stderr)
    return 1 if (check and stale) or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
