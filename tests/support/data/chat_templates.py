"""Chat templates of widely used models, with the labels of fixed conversations.

    PYTHONPATH=tests python -m support.data.chat_templates

writes the labels (`learned` in the YAML files of tests/corpus/chat_templates), for review. The
templates render as packages do, which `compare_templates` checks.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from finetune_trainer.config import DataConfig, DatasetSource
from finetune_trainer.data.encoding import Encoded, EncodedRow, RowEncoder
from finetune_trainer.data.rules import Rules
from finetune_trainer.data.source import Row
from finetune_trainer.data.template import with_arguments
from finetune_trainer.errors import DataError

FOLDER = Path(__file__).parents[2] / "corpus" / "chat_templates"
Messages = list[dict[str, Any]]
Learned = list[str] | str
"""Text of each learned turn with its stop token; or the sentence that refuses the row."""


def _turns(*texts: str) -> Messages:
    roles = ("user", "assistant") * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


_CITY = {"type": "string", "description": "Name of the city."}
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Return the weather.",
        "parameters": {"type": "object", "properties": {"city": _CITY}, "required": ["city"]},
    },
}
_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Bern"}},
}
_RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "31 degrees"}
_QUESTION, _REPLY, _NEXT_QUESTION, _NEXT_REPLY = _turns(
    "What is the capital?", "It is Bern.", "And of Italy?", "Rome, of course."
)
CONVERSATIONS: Mapping[str, Mapping[str, Any]] = {
    "system": {"messages": [{"role": "system", "content": "Be brief."}, _QUESTION, _REPLY]},
    "tools": {
        "messages": [
            {"role": "user", "content": "Weather in Bern?"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            _RESULT,
            {"role": "assistant", "content": "Hot today."},
        ],
        "tools": [_TOOL],
    },
    "multi-turn": {"messages": [_QUESTION, _REPLY, _NEXT_QUESTION, _NEXT_REPLY]},
    "reasoning": {
        "messages": [
            _QUESTION,
            {**_REPLY, "reasoning_content": "Switzerland is meant."},
            _NEXT_QUESTION,
            {**_NEXT_REPLY, "reasoning_content": "That one is known."},
        ]
    },
}


@dataclass(frozen=True)
class Origin:
    """The template of a package that this one was compared with.

    Attributes:
        equal: Conversations that both render alike, or both refuse.
    """

    package: str
    version: str
    template: str
    equal: tuple[str, ...]


@dataclass(frozen=True)
class ChatTemplateCase:
    """A family of models.

    Attributes:
        models: The models, for the reference.
        special: Special tokens of the template.
        added: Tokens of the vocabulary that are not flagged as special.
        stops: Tokens that end a turn.
        learned: Expected result by conversation.
        arguments: As in `spec.model.chatTemplateArguments`.
    """

    name: str
    models: str
    template: str
    special: tuple[str, ...]
    stops: tuple[str, ...]
    origin: Origin
    learned: Mapping[str, Learned] = field(default_factory=dict)
    added: tuple[str, ...] = ()
    bos: str | None = None
    eos: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


@cache
def cases() -> Mapping[str, ChatTemplateCase]:
    """Return every family by name."""
    return {file.stem: _case(file) for file in sorted(FOLDER.glob("*.yaml"))}


def template(name: str) -> str:
    """Return the template of a family."""
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")


def _case(file: Path) -> ChatTemplateCase:
    given: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    origin: dict[str, Any] = given.pop("origin")
    given |= {key: tuple(given.get(key, ())) for key in ("special", "added", "stops")}
    return ChatTemplateCase(
        name=file.stem,
        template=template(given.pop("template", file.stem)),
        origin=Origin(**origin | {"equal": tuple(origin["equal"])}),
        **given,
    )


def tokenizer(case: ChatTemplateCase) -> Any:
    """Return a byte-level tokenizer with the tokens and the template of a family."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Merges across the end of a prompt and its reply, which inference tokenises separately.
    words = {word: at for at, word in enumerate([*letters, "ĊI", "ĠH"])}
    backend = Tokenizer(models.BPE(words, [("Ċ", "I"), ("Ġ", "H")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=case.bos,
        eos_token=case.eos,
        additional_special_tokens=list(case.special),
        clean_up_tokenization_spaces=False,
        name_or_path=case.name,
    )
    fast.add_tokens([AddedToken(token, normalized=False) for token in case.added])
    fast.chat_template = with_arguments(case.template, case.arguments, ())
    return fast


def encode(tokenizer: Any, row: Mapping[str, Any], rules: Rules = Rules.CURRENT) -> EncodedRow:
    """Encode a row as training does.

    Raises:
        DataError: the row is refused.
    """
    config = DataConfig(train=DatasetSource(path="rows.jsonl"), cache_dir="unused")
    [encoded] = RowEncoder(config, tokenizer, rules).encode([Row("line 1", dict(row))])
    return encoded


def learned_turns(row: EncodedRow) -> Iterator[tuple[Encoded, int, int]]:
    """Yield the part, the first and the last token of each learned turn."""
    for part in row.parts:
        edges = [False, *part.is_label, False]
        changes = [at for at in range(len(edges) - 1) if edges[at] != edges[at + 1]]
        for start, end in zip(changes[::2], changes[1::2], strict=True):
            yield part, start, end


def learned_texts(tokenizer: Any, row: EncodedRow) -> list[str]:
    """Return the text of each learned turn."""
    return [tokenizer.decode(part.tokens[start:end]) for part, start, end in learned_turns(row)]


def learned(case: ChatTemplateCase) -> dict[str, Learned]:
    """Return the learned turns of each conversation, or its refusal."""
    fast = tokenizer(case)

    def of(conversation: str) -> Learned:
        try:
            row = encode(fast, CONVERSATIONS[conversation])
        except DataError as error:
            return str(error)
        return learned_texts(fast, row)

    return {conversation: of(conversation) for conversation in CONVERSATIONS}


def _write(file: Path, case: ChatTemplateCase) -> None:
    head, _, _ = file.read_text(encoding="utf-8").partition("learned:\n")
    lines = ["learned:"]
    for conversation, result in learned(case).items():
        is_refused = isinstance(result, str)
        lines.append(f"  {conversation}:" + (f" {_quoted(result)}" if is_refused else ""))
        lines += [] if is_refused else [f"    - {_quoted(text)}" for text in result]
    file.write_text(head + "\n".join([*lines, ""]), encoding="utf-8")


def _quoted(text: Any) -> str:
    return json.dumps(text, ensure_ascii=False)


if __name__ == "__main__":
    for name, case in cases().items():
        _write(FOLDER / f"{name}.yaml", case)
