"""Count the words and constructions to avoid; the counts in docs/prose.json may only fall.

    python docs/prose.py               # exit 1, with a sentence for each count that rose
    python docs/prose.py --write       # record lower counts
    python docs/prose.py --list PATH   # print each occurrence below a path

Counted: docstrings, comments, strings with a space, names at their definition, and Markdown
outside of code. Idiomatic uses such as "do nothing", "stands for" and "made of" are not counted.
"""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT, RECORD = Path(__file__).parents[1], "docs/prose.json"
WORDS = "anew|nobody|somebody|whoever|tells?|told|said|mend(?:s|ed)?|cure|for ever|any more"
RULES = {
    "word": rf"\b(?:{WORDS}|settle[sd]?|answer(?:s|ed)?|(?:is|are) over)\b",
    "made": r"\bmade\b(?! (?:up )?of\b)",
    "say": r"\bsays?\b(?! (?:yes|no)\b)",
    "kept": r"\bkept (?:of|for|by|as|that)\b|\b(?:is|are) kept\b",
    "nothing": r"(?<!\bdo )(?<!\bdoes )(?<!\bdoing )\bnothing\b(?! to (?:do|save|load|re\w+)\b)",
    "goes on": r"\b(?:goes|go|went|gone|going) on\b(?! to\b)",
    "stands, lies": r"\bstands?\b(?! (?:for|alone)\b)(?!-)|\blies\b(?! (?:between|within)\b)",
    "None where": r"\b(?:none|empty|nothing|false|true) where\b",
    "where it": r"\bwhere (?:it|there|that|they|one|no|none|nothing)\b",
    "return what": r"\b(?:returns?|yields?|notes?|counts?|shows?|says?|of|and|but|from|by) what\b",
    "one that": r"\b(?:one|ones|those|that) (?:that|of|which|who|whose)\b",
    "pronoun first": r'^"""(?:its?|ones?|th[oe]se|they|their|what|who|whose|nobody|nothing)\b',
    "as (a reason)": r", as (?:it|they|that|this|an?|the|no|nobody|its|each|both|all|what)\b",
}
PATTERNS = {name: re.compile(rule, re.I) for name, rule in RULES.items()}
# Generated or recorded text, these rules, and the module whose term is "answer".
EXEMPT = re.compile(
    r"(?:crds|tests/goldens|tests/corpus|charts/kustomize)/|docs/(?:reference|benchmarks)/.*\.md$"
    r"|docs/prose\.py$|trainer/finetune_trainer/answers\.py$"
)


def _package(path: str) -> str:
    """Return the folder of a module, a page or subfolder of docs/, or the top-level folder."""
    top, *rest = path.split("/")
    return "/".join([top, *rest[: {"operator": -1, "trainer": -1, "docs": 1}.get(top, 0)]])


def _python(text: str) -> Iterator[tuple[int, str]]:
    for kind, string, (line, _), *_ in tokenize.generate_tokens(io.StringIO(text).readline):
        if kind == tokenize.COMMENT or (kind == tokenize.STRING and " " in string):
            yield line, string
    for node in ast.walk(ast.parse(text)):
        stored = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None
        name = stored or getattr(node, "name", None) or getattr(node, "arg", None)
        if name and not isinstance(node, ast.alias | ast.keyword):
            yield node.lineno, re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", name)


def _places(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the rule of each occurrence in a file."""
    parts: Iterator[tuple[int, str]] = enumerate(text.split("\n"), 1)
    if path.endswith(".py"):
        parts = _python(text)
    elif path.endswith(".md"):
        if path == "CHANGELOG.md":  # released sections stay as published
            text = re.split(r"\n## (?!Unreleased)", text)[0]
        code = re.compile(r"```.*?```|`[^`\n]*`", re.S)
        parts = enumerate(code.sub(lambda m: "\n" * m[0].count("\n"), text).split("\n"), 1)
    else:
        parts = ((n, line[line.find("#") :]) for n, line in parts if "#" in line)
    for line, part in parts:
        for rule, pattern in PATTERNS.items():
            for found in pattern.finditer(part):
                yield line + part.count("\n", 0, found.start()), rule


def _git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True).stdout


def _raised(counts: dict[str, int], allowed: dict[str, int], verb: str) -> Iterator[str]:
    spare = sum(allowed[package] for package in allowed.keys() - counts.keys())
    for package, count in sorted(counts.items()):
        if package not in allowed and count <= spare:
            spare -= count  # a renamed package takes its count along
        elif count > (limit := allowed.get(package, 0)):
            rise = f"{verb} {count} words or constructions to avoid, {limit} are allowed"
            yield f"{package}: {rise}; reword them: python docs/prose.py --list {package}"


def main(option: str = "", below: str = "") -> int:
    """Compare counts with the record, and the record with its last two committed versions."""
    counts: dict[str, int] = {}
    for path in _git("ls-files", "-co", "--exclude-standard").split("\n"):
        is_text = path.endswith((".py", ".md", ".yaml", ".yml", "Makefile"))
        if is_text and not EXEMPT.match(path) and (ROOT / path).is_file():
            places = sorted(_places(path, (ROOT / path).read_text(encoding="utf-8")))
            counts[_package(path)] = counts.get(_package(path), 0) + len(places)
            if option == "--list" and path.startswith(below):
                sys.stdout.writelines(f"{path}:{line}: {rule}\n" for line, rule in places)
    record = json.loads((ROOT / RECORD).read_text(encoding="utf-8"))
    faults = [*_raised(counts, record, "has")]
    for commit in _git("log", "-2", "--format=%H", "--", RECORD).split():
        faults += _raised(
            record, json.loads(_git("show", f"{commit}:{RECORD}")), f"{RECORD} was raised to"
        )
    if option == "--write" and not faults:
        (ROOT / RECORD).write_text(json.dumps(counts, indent=2, sort_keys=True) + "\n")
    elif counts != record and not faults:
        faults = [f"{RECORD} is stale: counts fell; run: python docs/prose.py --write"]
    sys.stderr.writelines(f"{fault}\n" for fault in dict.fromkeys(faults))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
