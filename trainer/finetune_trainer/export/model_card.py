"""Render the README.md of an exported model: description, usage, results and provenance.

`export` writes it. The hub reads the front matter; values that it cannot resolve, such as a local
path, are omitted.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import yaml

from finetune_trainer.config import Progress, TrainConfig

Kind = Literal["adapter", "model"]

_CONFIGURATION = re.compile(r"## Configuration\n\n```json\n(.*?)\n```", re.DOTALL)
_PACKAGES = ("finetune-operator", "torch", "transformers", "peft", "bitsandbytes", "datasets")


@dataclass(frozen=True)
class CardFacts:
    """Facts of a card that are neither in the configuration nor in the progress of the run.

    Attributes:
        kind: `adapter` for LoRA weights, `model` for a whole model.
        base: Name or path of the base model; the exported adapter contains the same one.
        base_is_public: Whether another machine can resolve `base`.
        data_hash: Content hash of each training set; None if the sets could not be read again.
        notes: Notes for users of this kind of export, one sentence each.
    """

    kind: Kind
    base: str
    base_is_public: bool
    data_hash: str | None
    notes: Sequence[str]


def model_card(config: TrainConfig, progress: Progress, facts: CardFacts) -> str:
    """Return the Markdown text, with YAML front matter, of one exported folder."""
    what = "LoRA adapter for" if facts.kind == "adapter" else "Fine-tuned from"
    sections = [
        f"---\n{yaml.safe_dump(_front_matter(config, facts), sort_keys=False)}---",
        f"# {config.job.name}",
        f"{what} `{facts.base}`, trained for {exported_step(progress)} steps by finetune-operator.",
        *(f"Note: {note}." for note in facts.notes),
        "## Load it",
        f"```python\n{_snippet(facts)}\n```",
        "## Results",
        _table(("", "before", "after"), _results(progress)),
        "## Data",
        _table(("", "training", "held-out"), _data(config, progress, facts)),
        "## Configuration",
        f"```json\n{json.dumps(_settings(config), indent=2)}\n```",
        "## Versions",
        _table(("package", "version"), _versions()),
    ]
    return "\n\n".join(sections) + "\n"


def settings_in(card: str) -> dict[str, Any]:
    """Return the settings of the run in the text of a card; empty if it was written by others."""
    found = _CONFIGURATION.search(card)
    with suppress(ValueError):
        settings = json.loads(found[1]) if found else {}
        return settings if isinstance(settings, dict) else {}
    return {}


def exported_step(progress: Progress) -> int:
    """Return the step of the exported weights."""
    return progress.step if progress.exported_step is None else progress.exported_step


def notes(config: TrainConfig, kind: Kind) -> list[str]:
    """Return the notes that follow from the configuration."""
    method, found = config.method, []
    if method.quantization != "none" and kind == "model":
        found.append(
            f"the adapters were merged into the dequantised {method.quantization} base, which they "
            "were trained against, not into its original weights"
        )
    elif method.quantization != "none":
        found.append(
            f"the adapter was trained against the base in {method.quantization}; on an "
            "unquantised base its output differs slightly"
        )
    special = ["DoRA magnitudes"] if method.lora is not None and method.lora.dora else []
    special += ["rows of added tokens"] if config.model.add_tokens else []
    if special and kind == "adapter":
        found.append(
            f"the adapter contains {' and '.join(special)}, which vLLM does not load; for vLLM "
            "export with spec.output.format merged"
        )
    return found


def _front_matter(config: TrainConfig, facts: CardFacts) -> dict[str, Any]:
    method = "full-fine-tuning" if config.method.type == "full" else config.method.type
    matter: dict[str, Any] = {
        "library_name": "peft" if facts.kind == "adapter" else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["finetune-operator", method],
    }
    if facts.base_is_public:
        matter["base_model"] = facts.base
        matter["base_model_relation"] = "adapter" if facts.kind == "adapter" else "finetune"
    if hub_sets := [source.path for source in config.data.sources if source.is_hub]:
        matter["datasets"] = hub_sets
    return matter


def _snippet(facts: CardFacts) -> str:
    auto = "AutoPeftModelForCausalLM" if facts.kind == "adapter" else "AutoModelForCausalLM"
    library = "peft" if facts.kind == "adapter" else "transformers"
    return f"""\
from {library} import {auto}
from transformers import AutoTokenizer

model = {auto}.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")"""


def _results(progress: Progress) -> list[tuple[str, str, str]]:
    return [
        ("held-out loss", _number(progress.eval_loss_before), _number(progress.eval_loss)),
        (f"training loss of step {exported_step(progress)}", "-", _number(progress.loss)),
    ]


def _data(config: TrainConfig, progress: Progress, facts: CardFacts) -> list[tuple[str, str, str]]:
    train, held_out = progress.train_data, progress.eval_data
    rows = [
        (label, str(getattr(train, name, "-")), str(getattr(held_out, name, "-")))
        for label, name in (
            ("rows", "rows"),
            ("sequences", "sequences"),
            ("tokens", "tokens"),
            ("tokens with a label", "label_tokens"),
            ("rows truncated", "truncated_rows"),
            ("rows split", "split_rows"),
            ("rows without a label", "rows_without_labels"),
        )
    ]
    rows[:0] = [
        ("data set", f"{source.path} ({source.split}), weight {source.weight:g}", "-")
        for source in config.data.sources
        if source.is_hub
    ]
    rows.append(("content hash", facts.data_hash or "-", "-"))
    return rows


def _settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that determine the result, without local paths."""
    settings: dict[str, Any] = config.model_dump(
        mode="json",
        by_alias=True,
        exclude_none=True,
        include={
            "model": {"add_tokens"},
            "method": True,
            "training": True,
            "strategy": True,
            "world": True,
            "data": {"format", "max_seq_len", "long_rows", "packing"},
        },
        exclude={"method": {"lora": {"start_from"}}, "strategy": {"nvme_path"}},
    )
    return settings


def _versions() -> list[tuple[str, str]]:
    found = []
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found.append((name, version(name)))
    return found


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
