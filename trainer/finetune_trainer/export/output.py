"""Write the trained model for others to load, and refuse to call a broken one finished.

`rank` calls `check_replaceable` before anything starts and `export` on rank 0 after the last step.
What is written passes its gates in a staging folder; only then does it become the output.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from finetune_trainer.claims.fence import Fence
from finetune_trainer.config import Progress, TrainConfig
from finetune_trainer.errors import TrainerError
from finetune_trainer.export.model_card import CardFacts, Kind, model_card, notes
from finetune_trainer.export.publish import open_staging, publish, refuse_foreign
from finetune_trainer.model.load import base_name

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"

# What an export may write of each kind; which of it exactly is known when it is written.
_BESIDE = (
    "README.md",
    "added_tokens.json",
    "chat_template*",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer*",
    "vocab*",
)
_PATTERNS: dict[Kind, tuple[str, ...]] = {
    "adapter": (*_BESIDE, ADAPTER_FILE, ADAPTER_CONFIG),
    "model": (*_BESIDE, "config.json", "generation_config.json", "model*.safetensors*"),
}


def check_replaceable(config: TrainConfig) -> None:
    """Refuse an output folder in which the export would replace a file of somebody else.

    It goes by the names of what is mostly written; `export` itself checks every file again.

    Raises:
        OutputNotWritableError: names the folder and the file.
    """
    output = Path(config.output.dir).absolute()
    found = (
        path
        for kind, folder in _layout(config)
        for pattern in _PATTERNS[kind]
        for path in (output / folder).glob(pattern)
        if not path.is_dir()
    )
    refuse_foreign(output, [path.relative_to(output).as_posix() for path in found])


def export(
    model: "nn.Module",
    tokenizer: "PreTrainedTokenizerBase",
    config: TrainConfig,
    *,
    fence: Fence,
    progress: Progress,
    warn: Callable[[str], None],
    max_shard_bytes: int = 4 * 2**30,
) -> tuple[str, ...]:
    """Write the formats of `output.format` to `output.dir` and return their folders.

    One format lies directly in `output.dir`, two in `adapter/` and `merged/` below it. Weights
    keep the type they were trained in. `model` is not changed; merging takes a second copy of it.

    A whole model of more than `max_shard_bytes` is written as several files. `fence` has the output
    folder. The card tells of `progress`; `warn` receives a sentence for what is worth knowing but
    no failure.

    Raises:
        TrainerError: the adapter is empty, the merged model answers differently, or the output
            cannot be written.
        OutputNotWritableError: a file of somebody else would be replaced.
        OvertakenError: a later attempt has the output folder.
    """
    from safetensors import SafetensorError

    output = Path(config.output.dir).absolute()
    public_name = base_name(config.model)
    if public_name is None:
        warn(
            f"the base model's name is not known, so what is exported names {config.model.path}, "
            "which another machine cannot load; set spec.model.baseName"
        )
    base = public_name or config.model.path
    layout, data_hash = _layout(config), _data_hash(config, warn)
    try:
        staged = open_staging(output, fence.holding(output).claim)
        try:
            for kind, below in layout:
                folder = staged / below
                folder.mkdir(exist_ok=True)
                if kind == "adapter":
                    _write_adapter(cast("PeftModel", model), folder, base)
                else:
                    _write_model(model, folder, max_shard_bytes, warn)
                _write_tokenizer(tokenizer, folder)
                for note in notes(config, kind):
                    warn(note)
                facts = CardFacts(kind, base, public_name is not None, data_hash)
                (folder / "README.md").write_text(model_card(config, progress, facts))
            publish(staged, output, progress.step, fence)
        finally:
            shutil.rmtree(staged, ignore_errors=True)  # gone already when it was published
    except (OSError, SafetensorError) as error:
        raise TrainerError(
            f"spec.output.uri {output} could not be written ({error}); the last checkpoint is "
            "committed, so make room and start the job again"
        ) from error
    return tuple(str(output / below) for _, below in layout)


def _layout(config: TrainConfig) -> list[tuple[Kind, str]]:
    """Say which kinds are exported, and to which folders below `output.dir`."""
    if config.output.format == "both":
        return [("adapter", "adapter"), ("model", "merged")]
    return [("adapter" if config.output.format == "adapter" else "model", "")]


def _write_model(
    model: "nn.Module", folder: Path, max_shard_bytes: int, warn: Callable[[str], None]
) -> None:
    from finetune_trainer.export.merge import merged_copy, probe_logits

    whole = cast("PreTrainedModel", model)
    if hasattr(model, "peft_config"):
        whole = merged_copy(cast("PeftModel", model), warn)
    else:
        probe_logits(model)  # refuses a model that has broken down
    whole.save_pretrained(folder, max_shard_size=max_shard_bytes)


def _write_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # a full disk is no OSError there, but a bare Exception
        raise OSError(f"the tokenizer: {error}") from error


def _write_adapter(model: "PeftModel", folder: Path, base: str) -> None:
    # Rows of added tokens are written with the adapters; "auto" would ask the hub for the base.
    model.save_pretrained(str(folder), save_embedding_layers=False)
    path = folder / ADAPTER_CONFIG
    settings = json.loads(path.read_text()) | {"base_model_name_or_path": base}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    check_adapter(folder)


def check_adapter(folder: Path) -> None:
    """Read a written adapter back and refuse one that would change nothing.

    Raises:
        TrainerError: it has no tensors, its B matrices are all zero, or a value is not finite.
    """
    from safetensors.torch import load_file

    tensors = load_file(folder / ADAPTER_FILE)
    if not any(tensor.numel() for tensor in tensors.values()):
        raise TrainerError(
            "the adapter has no weights, so it is not exported; start the job again, it goes on "
            "from the last checkpoint"
        )
    broken = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if broken:
        raise TrainerError(
            f"{len(broken)} tensors of the adapter are not finite (first {broken[0]}), so it is "
            "not exported; lower spec.training.learningRate or use spec.training.precision fp32"
        )
    up = [tensor for name, tensor in tensors.items() if "lora_B" in name]
    if not any(bool(tensor.any()) for tensor in up):
        raise TrainerError(
            "the adapter is all zero: training changed nothing, so it is not exported; check "
            "spec.training.learningRate and that the rows have labels"
        )


def _data_hash(config: TrainConfig, warn: Callable[[str], None]) -> str | None:
    """Hash the training rows once more; the export does not fail for want of it."""
    from finetune_trainer.data.source import open_rows

    cache = Path(config.data.cache_dir)
    try:
        return " ".join(
            open_rows(source, name="train", cache_dir=cache).fingerprint()
            for source in config.data.sources
        )
    except (TrainerError, OSError) as error:
        warn(f"the model card lacks the hash of the training data: {error}")
        return None
