"""Write `chat-templates.md` from the corpus of chat templates in tests/corpus/chat_templates.

`generate` calls it. A test compares the results in the corpus with the trainer's.
"""

from pathlib import Path
from typing import Any

import yaml

CORPUS = Path(__file__).parents[2] / "tests" / "corpus" / "chat_templates"
_HEAD = """\
# Models and chat templates

Generated from `tests/corpus/chat_templates`; `make generate` writes it.

Any chat template works by the same rules ([data](../how-to/data.md)). These are tested, each with
four conversations:

- **system**: a system turn, a question and a reply
- **tools**: `tools`, a question, a call, its result and a reply
- **multi-turn**: two questions and two replies
- **reasoning**: two questions and two replies with `reasoning_content`

*learned* means that the labels are exactly the turns of the assistant with their stop tokens, each
after the prompt of inference. Other rows are refused with a sentence, which is below the table.
Arguments beside a model are its `spec.model.chatTemplateArguments`.

Each template is written for the tests and renders like a package's, which the last column names.
A model may have another revision of its template: `ftctl preview` shows the labels. LLaMA-Factory
writes tools and reasoning outside of its templates, so these two columns were not compared with it.
"""


def page() -> str:
    """Return the reference as Markdown."""
    rows, sentences = [], list[str]()
    for file in sorted(CORPUS.glob("*.yaml"), key=lambda file: _order(file.stem)):
        case = yaml.safe_load(file.read_text(encoding="utf-8"))
        cells = [_cell(result, sentences) for result in case["learned"].values()]
        stops = " ".join(map(_code, _stops(case)))
        rows.append("| " + " | ".join([_models(case), *cells, stops, _origin(case)]) + " |")
    columns = ["Models", *case["learned"], "Learned stop tokens", "Compared with"]
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    notes = [f"{number}. `{sentence}`" for number, sentence in enumerate(sentences, 1)]
    return "\n".join([_HEAD, *head, *rows, "", "## Why a row is refused\n", *notes, ""])


def _models(case: dict[str, Any]) -> str:
    """Return the models, with their `spec.model.chatTemplateArguments`."""
    arguments = case.get("arguments", {}).items()
    return str(case["models"]) + "".join(
        f", `{name}: {value}`".lower() for name, value in arguments
    )


def _order(name: str) -> tuple[str, str]:
    return name.split("-")[0], name


def _cell(result: list[str] | str, sentences: list[str]) -> str:
    """Return a cell, and add the sentence of a refusal to those below the table."""
    if isinstance(result, list):
        return "learned"
    if result not in sentences:
        sentences.append(result)
    return f"refused ({sentences.index(result) + 1})"


def _stops(case: dict[str, Any]) -> list[str]:
    """Return the tokens that end learned turns, in the order of the entry."""
    results = [result for result in case["learned"].values() if isinstance(result, list)]
    texts = [text for result in results for text in result]
    return [stop for stop in case["stops"] if any(text.endswith(stop) for text in texts)]


def _code(token: str) -> str:
    return f"`{token}`".replace("|", "\\|")


def _origin(case: dict[str, Any]) -> str:
    origin = case["origin"]
    return f"{origin['package']} {origin['version']}, `{origin['template']}`"
