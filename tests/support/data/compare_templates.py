"""Compare the chat templates of the corpus with templates of packages.

    pip install --target LIB --no-deps trl axolotl llamafactory
    PYTHONPATH=tests python -m support.data.compare_templates LIB [--write]

renders each conversation with a template of the corpus and with its `origin`, and prints
differences. `--write` records the version and the equal conversations. No test needs the packages.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from support.data.chat_templates import CONVERSATIONS, FOLDER, ChatTemplateCase, cases

FOLDERS = {
    "trl": "trl/chat_templates",
    "axolotl": "axolotl/utils/chat_templates/templates",
}
# LLaMA-Factory writes calls and thoughts by code of its own, not by the template.
PLAIN = ("system", "multi-turn")
Rendered = tuple[str, ...] | None
"""Text of a conversation and of the prompt for its last turn; None if it is refused."""


def main(arguments: list[str] | None = None) -> int:
    """Compare all templates; return 1 if one renders a conversation otherwise."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("library", type=Path, help="folder with the packages")
    parser.add_argument("--write", action="store_true", help="record versions and equality")
    given = parser.parse_args(arguments)
    sys.path.append(str(given.library))
    versions = {one.name: one.version for one in distributions(path=[str(given.library)])}
    has_failed = False
    for case in cases().values():
        origin = case.origin
        ours, theirs = _with_jinja(case, case.template), _theirs(case, given.library)
        compared = CONVERSATIONS if origin.package in FOLDERS else PLAIN
        pairs = {
            name: (ours(CONVERSATIONS[name]), theirs(CONVERSATIONS[name])) for name in compared
        }
        equal = [name for name, (our, their) in pairs.items() if our == their]
        for name in pairs.keys() - equal:
            print(f"{case.name}, {name}:\n  ours   {pairs[name][0]}\n  theirs {pairs[name][1]}")
        has_failed |= len(equal) < len(pairs)
        print(f"{case.name}: equal to {origin.package} {origin.template}: {', '.join(equal)}")
        if given.write:
            _record(case, versions[origin.package], equal)
    return int(has_failed)


def _theirs(case: ChatTemplateCase, library: Path) -> Callable[[Mapping[str, Any]], Rendered]:
    if folder := FOLDERS.get(case.origin.package):
        source = library / folder / f"{case.origin.template}.jinja"
        return _with_jinja(case, source.read_text(encoding="utf-8"))
    return _with_llamafactory(case)


def _with_jinja(case: ChatTemplateCase, template: str) -> Callable[[Mapping[str, Any]], Rendered]:
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(row: Mapping[str, Any]) -> Rendered:
        texts = []
        for messages, prompt in ((row["messages"], False), (row["messages"][:-1], True)):
            try:
                [text], _ = render_jinja_template(
                    conversations=[_with_text_arguments(messages, template)],
                    tools=row.get("tools"),
                    chat_template=template,
                    add_generation_prompt=prompt,
                    bos_token=case.bos or "",
                    eos_token=case.eos or "",
                    **case.arguments,
                )
            except Exception:  # a template is a program and may raise anything
                return None
            texts.append(text)
        return tuple(texts)

    return render


def _with_text_arguments(messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """Write the arguments of calls as text for the templates that join them (DeepSeek)."""
    if "tojson" in template or "items" in template:
        return messages
    calls = json.loads(json.dumps(messages))
    for call in (call for one in calls for call in one.get("tool_calls", [])):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return list(calls)


def _with_llamafactory(case: ChatTemplateCase) -> Callable[[Mapping[str, Any]], Rendered]:
    # Imported by its readers of sound, none of which is called here.
    sys.modules.setdefault("torchaudio", ModuleType("torchaudio"))
    from llamafactory.data.template import TEMPLATES  # type: ignore[import-not-found]

    # Tokens are texts here; the end of the last turn is added where the template has no own one.
    tokenizer = SimpleNamespace(
        bos_token_id=case.bos,
        eos_token_id=case.eos,
        encode=lambda text, **_: [text],
        convert_tokens_to_ids=lambda token: token,
    )

    def render(row: Mapping[str, Any]) -> Rendered:
        system = [one["content"] for one in row["messages"] if one["role"] == "system"]
        pairs = TEMPLATES[case.origin.template].encode_multiturn(
            tokenizer, [one for one in row["messages"] if one["role"] != "system"], *system
        )
        parts = ["".join(map(str, part)) for pair in pairs for part in pair]
        return "".join(parts), "".join(parts[:-1])

    return render


def _record(case: ChatTemplateCase, version: str, equal: list[str]) -> None:
    file = FOLDER / f"{case.name}.yaml"
    text = file.read_text(encoding="utf-8")
    text = re.sub(r"(?m)^  version: .*$", f"  version: {version}", text, count=1)
    text = re.sub(r"(?m)^  equal: .*$", f"  equal: [{', '.join(equal)}]", text, count=1)
    file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
