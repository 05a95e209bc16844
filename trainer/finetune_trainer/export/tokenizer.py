"""Write the tokenizer of an export: the files of the base, with the changes of the run alone.

`beside` calls it. transformers saves a tokenizer under another class and with other keys than it
has read, which earlier versions and servers do not understand.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_trainer.config import ModelConfig
from finetune_trainer.export.end_tokens import EndTokens
from finetune_trainer.model.snapshot import TOKENIZER_FILES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SETTINGS, _TOKENS, _MAP = "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json"


def write_tokenizer(
    tokenizer: "PreTrainedTokenizerBase",
    config: ModelConfig,
    base: Path | None,
    ends: EndTokens,
    folder: Path,
) -> None:
    """Write the files of a tokenizer into `folder`.

    Args:
        tokenizer: Tokenizer with the template and the tokens of the configuration.
        config: Names the changes of the run.
        base: Folder of the base model; None if it is gone.
        ends: End token to set.
        folder: Folder of the export.
    """
    if base is None or (config.add_tokens and not (base / _TOKENS).is_file()):
        tokenizer.save_pretrained(folder)
    else:
        _copy(base, folder)
        _add_tokens(folder, tokenizer, config.add_tokens)
        if config.chat_template is not None or config.chat_template_arguments:
            _replace_template(folder, tokenizer)
    if ends.is_replaced:
        _edit(folder / _SETTINGS, {"eos_token": ends.token})
        if (folder / _MAP).is_file():
            _edit(folder / _MAP, {"eos_token": ends.token})


def _copy(base: Path, folder: Path) -> None:
    """Copy the files of a tokenizer."""
    for path in files_of(base):
        target = folder / path.relative_to(base)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


def files_of(folder: Path) -> list[Path]:
    """Return the files of the tokenizer in `folder`."""
    found = (path for pattern in TOKENIZER_FILES for path in folder.glob(pattern))
    return sorted(path for path in found if path.is_file())


def reader_notes(folder: Path) -> list[str]:
    """Name the versions of transformers that cannot load the tokenizer in `folder`."""
    name = _read(folder / _SETTINGS).get("tokenizer_class")
    if name != "TokenizersBackend":
        return []
    return [
        f"transformers 4 cannot load the tokenizer, whose class {name} is new in version 5; set "
        f"tokenizer_class in {_SETTINGS} to PreTrainedTokenizerFast for it"
    ]


def _add_tokens(folder: Path, tokenizer: Any, tokens: Iterable[str]) -> None:
    """Add special tokens to the list that `tokenizer.json` and the other files have."""
    new = {token: tokenizer.convert_tokens_to_ids(token) for token in tokens}
    if not new:
        return
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    entries = [{"id": id, "content": token, **flags, "special": True} for token, id in new.items()]
    path = folder / _TOKENS
    content = json.loads(path.read_text(encoding="utf-8"))
    content["added_tokens"] = [*content.get("added_tokens", ()), *entries]
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    by_id = {str(entry.pop("id")): entry for entry in entries}
    known = _read(folder / _SETTINGS).get("added_tokens_decoder")
    if known is not None:
        _edit(folder / _SETTINGS, {"added_tokens_decoder": {**known, **by_id}})
    if (folder / "added_tokens.json").is_file():
        _edit(folder / "added_tokens.json", new)


def _replace_template(folder: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    for path in (*folder.glob("chat_template*"), *folder.glob("additional_chat_templates/*")):
        path.unlink()
    settings, _ = tokenizer.save_chat_templates(folder, _read(folder / _SETTINGS), None, True)
    settings.pop("chat_template", None)
    _write(folder / _SETTINGS, settings)


def _edit(path: Path, changes: dict[str, Any]) -> None:
    _write(path, _read(path) | changes)


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def _write(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
