"""Name the fields of a row that carry turns, masks or tools and are not read.

Called by `piecework`, which counts them for a warning. Other columns that are not read, such as
`id` or `source`, are common and appear in the preview only.
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from finetune_trainer.config import DataConfig, DataFormat
from finetune_trainer.data import masks
from finetune_trainer.data.formats import unread_columns
from finetune_trainer.data.source import Row

THOUGHTS = ("reasoning_content", "reasoning", "thinking", "reasoning_details", "thinking_blocks")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
PREFERENCE = "label"  # as a truth value: false marks a completion to avoid (TRL)
COLUMNS = frozenset(
    {
        *("messages", "conversations", "conversation", "dialogue", "dialog", "turns", "history"),
        *("chosen", "rejected", "rejected_response", "kto_tag", "refusal"),
        *("chat_history", "conversation_history"),
        *("system", "system_prompt", "system_message", "systemPrompt", "chat_template_kwargs"),
        *("tools", "functions", "function_call", "tool_calls", "tool_definitions"),
        *("available_tools",),
        *masks.OF_ROW,
        *(masks.AMBIGUOUS, "assistant_masks", "completion_mask"),
        *THOUGHTS,
        *MEDIA,
    }
)
KEYS = frozenset(
    {
        *("reasoning_details", "thinking_blocks", "thought", "thoughts", "reasoning_text"),
        *("refusal", "train_detail", "loss_scale", *MEDIA),
    }
)
"""Keys of a turn; the texts that a template drops are refused elsewhere (`turns`)."""
_READ = frozenset(
    {
        *("role", "from", "content", "value", "name", "tool_call_id", "tool_calls"),
        *("function_call", masks.AMBIGUOUS, *masks.OF_ROW, *THOUGHTS[:3]),
    }
)
"""Keys of a turn that the trainer or every template reads."""


def unread_fields(row: Row, config: DataConfig, template: str | dict[str, str] | None) -> set[str]:
    """Return the names of such columns, and of keys of turns that the chat template does not read.

    Raises:
        DataError: see `formats.read_example`.
    """
    names = {name for name in COLUMNS.intersection(row.values) if _is_filled(row.values[name])}
    if isinstance(row.values.get(PREFERENCE), bool):
        names.add(PREFERENCE)
    is_chat = config.format is DataFormat.CHAT
    text = "\n".join(template.values()) if isinstance(template, dict) else template or ""
    # Most rows have one such column, the turns, so that they need not be read again.
    is_usual = is_chat and config.columns.messages is None and len(names) == 1
    if names and not (is_usual and names <= {"messages", "conversations"}):
        names &= {*unread_columns(row, config.format, config.columns)}
    else:
        names = set()
    if is_chat:
        for turn in _turns(row, config):
            for key, value in turn.items():
                if key not in _READ and _carries(key, value) and not _is_read(key, text):
                    names.add(key)
    return names


def _turns(row: Row, config: DataConfig) -> Iterator[dict[str, Any]]:
    columns = config.columns
    named = (columns.messages, columns.prompt, columns.completion)
    for name in (*filter(None, named), "messages", "conversations", "prompt", "completion"):
        value = row.values.get(name)
        if isinstance(value, list):
            yield from (item for item in value if isinstance(item, dict))


def _is_filled(value: Any) -> bool:
    """Whether a value is not empty; false and 0 are values."""
    return value is not None and value not in ("", [], {})


def _carries(key: str, value: Any) -> bool:
    """Whether a key of a turn may be a mask, tools, calls or thoughts."""
    return (isinstance(value, bool | list | dict) and bool(value != [] and value != {})) or (
        key in KEYS and _is_filled(value)
    )


@cache
def _is_read(key: str, template: str) -> bool:
    """Whether a template names a key as an attribute or in quotes."""
    return re.search(rf"""[.'"]{re.escape(key)}\b""", template) is not None
