"""Write the trained model in formats that other programs load, and refuse a broken one.

`rank` calls `check_replaceable` first of all, and `finishing` calls `export` on rank 0, after
`tryout` has shown that the model can be exported. The files must pass checks in a staging folder
before they become the output.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from finetune_trainer.claims.fence import Fence
from finetune_trainer.config import Progress, TrainConfig
from finetune_trainer.control import is_out_of_memory
from finetune_trainer.errors import ExportError, OutputNotWritableError, TrainerError
from finetune_trainer.export.beside import CompanionFiles
from finetune_trainer.export.model_card import Kind, exported_step
from finetune_trainer.export.publish import (
    files_of_export,
    open_staging,
    publish,
    refuse_foreign,
)
from finetune_trainer.export.settings import GENERATION_CONFIG
from finetune_trainer.export.unread import add_unread
from finetune_trainer.model.adapters import ADAPTER_CONFIG, ADAPTER_FILE
from finetune_trainer.model.load import base_name
from finetune_trainer.model.snapshot import PROCESSOR_FILES

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Files that an export may write, by kind. The exact names are known after the write.
_BESIDE = (
    "README.md",
    "added_tokens.json",
    "additional_chat_templates/*.jinja",
    "chat_template*",
    "merges*",
    "special_tokens_map.json",
    "tokenizer*",
    "vocab*",
)
_PATTERNS: dict[Kind, tuple[str, ...]] = {
    "adapter": (*_BESIDE, ADAPTER_FILE, ADAPTER_CONFIG, GENERATION_CONFIG),
    "model": (
        *_BESIDE,
        "config.json",
        GENERATION_CONFIG,
        "model*.safetensors*",
        PROCESSOR_FILES,
    ),
}


def check_replaceable(config: TrainConfig) -> None:
    """Refuse an output folder in which the export would replace a foreign file.

    This checks the usual file names; `export` checks every file again.

    Raises:
        OutputNotWritableError: a foreign file exists; the message names folder and file.
    """
    output = Path(config.output.dir).absolute()
    found = (
        path
        for kind, folder in layout(config)
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
    stops: Sequence[int] = (),
    max_shard_bytes: int = 4 * 2**30,
) -> tuple[str, ...]:
    """Write the formats of `output.format` to `output.dir` and return their folders.

    A single format is written directly to `output.dir`; of two, `adapter/` is written before
    `merged/`. If only the merged model was requested and the merge fails, the adapter is written to
    `adapter/`. An adapter retains the dtype of the training. `model` is not changed; merging and
    another dtype take a second copy of it.

    Args:
        model: Trained model.
        tokenizer: Tokenizer with the template and the tokens of the configuration.
        config: Configuration of the run.
        fence: Holds the output folder.
        progress: Results for the model card.
        warn: Receives a sentence for each anomaly that is not a failure.
        stops: Special tokens that ended the learned turns, the most frequent one first.
        max_shard_bytes: Size above which a whole model is written as several files.

    Raises:
        ExportError: the adapter is empty, or the merged model has other logits.
        TrainerError: the output cannot be written.
        OutputNotWritableError: a foreign file would be replaced.
        OvertakenError: a later attempt owns the output folder.
    """
    from safetensors import SafetensorError

    output = Path(config.output.dir).absolute()
    companions = CompanionFiles.of(
        model,
        tokenizer,
        config,
        stops=stops,
        warn=warn,
        progress=progress,
        data_hash=_data_hash(config, warn),
    )
    write = _Write(model, companions, fence, warn, max_shard_bytes)
    parts = layout(config)
    try:
        for number, (kind, below) in enumerate(parts):
            earlier = files_of_export(output) if number else ()
            write(kind, below, earlier_files=earlier, is_last=number == len(parts) - 1)
    except MergeFailedError as error:
        is_saved = len(parts) == 2
        if not is_saved:
            with suppress(ExportError, OutputNotWritableError, OSError, SafetensorError):
                earlier = files_of_export(output)
                write("adapter", "adapter", earlier_files=earlier, is_last=False)
                is_saved = True
        where = f"the adapter is in {output / 'adapter'}, and " if is_saved else ""
        raise ExportError(
            f"{error}; {where}the last checkpoint is committed: set spec.output.format adapter to "
            "finish without merging or further training"
        ) from error
    except (OSError, SafetensorError) as error:
        raise TrainerError(
            f"spec.output.uri {output} could not be written ({error}); the last checkpoint is "
            "committed, so make room and start the job again"
        ) from error
    except TrainerError:
        raise
    except Exception as error:  # raised by a library; a retry with the same model would fail again
        raise ExportError(
            f"the trained model cannot be exported ({_reason(error)}); the last checkpoint is "
            "committed"
        ) from error
    return tuple(str(output / below) for _, below in parts)


@dataclass(frozen=True)
class _Write:
    """Writes one kind of export and publishes it."""

    model: "nn.Module"
    companions: CompanionFiles
    fence: Fence
    warn: Callable[[str], None]
    max_shard_bytes: int

    def __call__(
        self, kind: Kind, below: str, *, earlier_files: Iterable[str], is_last: bool
    ) -> None:
        config = self.companions.config
        output = Path(config.output.dir).absolute()
        staged = open_staging(output, self.fence.holding(output).claim)
        try:
            folder = staged / below
            folder.mkdir(exist_ok=True)
            if kind == "adapter":
                _write_adapter(cast("PeftModel", self.model), folder, config)
            else:
                _write_model(self.model, folder, self.max_shard_bytes, config, self.warn)
            self.companions.write(kind, folder)
            base, unread = self.companions.base, self.companions.unread
            if kind == "model" and base is not None and unread is not None:
                add_unread(folder, base, unread, self.max_shard_bytes)
            for note in self.companions.notes(kind):
                self.warn(note)
            step = exported_step(self.companions.progress)
            publish(staged, output, step, self.fence, earlier_files=earlier_files, is_last=is_last)
        finally:
            shutil.rmtree(staged, ignore_errors=True)  # already gone after `publish`


def layout(config: TrainConfig) -> list[tuple[Kind, str]]:
    """Return the kinds to export, each with its folder below `output.dir`."""
    if config.output.format == "both":
        return [("adapter", "adapter"), ("model", "merged")]
    return [("adapter" if config.output.format == "adapter" else "model", "")]


def _write_model(
    model: "nn.Module",
    folder: Path,
    max_shard_bytes: int,
    config: TrainConfig,
    warn: Callable[[str], None],
) -> None:
    from safetensors import SafetensorError

    from finetune_trainer.export.dtype import choose_dtype
    from finetune_trainer.export.merge import cast_copy, merged_copy, probe_logits

    is_adapted = hasattr(model, "peft_config")
    try:
        if is_adapted:
            whole = merged_copy(cast("PeftModel", model), config.output.dtype, warn)
        else:
            whole = cast("PreTrainedModel", model)
            probe_logits(whole)  # refuses a model that has broken down
            dtype = choose_dtype(whole, config, warn)
            if dtype != whole.dtype:
                whole = cast_copy(whole, dtype)
        whole.save_pretrained(folder, max_shard_size=max_shard_bytes)
    except (OSError, SafetensorError):
        raise  # a disk error, which another attempt may not encounter
    except Exception as error:  # of peft, of the model's own code, or out of memory
        if not is_adapted:
            raise
        if isinstance(error, ExportError):
            raise MergeFailedError(str(error)) from error
        why = f"the adapters cannot be merged ({_reason(error)})"
        if is_out_of_memory(error):
            why += ", which takes 4 bytes of this host's memory for each parameter of the model"
        raise MergeFailedError(why) from error


class MergeFailedError(Exception):
    """The merged model could not be built; the message states the reason."""


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _write_adapter(model: "PeftModel", folder: Path, config: TrainConfig) -> None:
    # Rows of added tokens are saved with the adapters; "auto" would query the hub for the base.
    model.save_pretrained(str(folder), save_embedding_layers=False)
    name_base(folder, config)
    check_adapter(folder)


def name_base(folder: Path, config: TrainConfig) -> None:
    """Write the public name of the base model into a saved adapter."""
    path = folder / ADAPTER_CONFIG
    base = base_name(config.model) or config.model.path
    settings = json.loads(path.read_text()) | {"base_model_name_or_path": base}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def check_adapter(folder: Path) -> None:
    """Read a saved adapter back and refuse it if it has no effect.

    Raises:
        ExportError: it has no tensors, its B matrices are all zero, or a value is not finite.
    """
    from safetensors.torch import load_file

    tensors = load_file(folder / ADAPTER_FILE)
    if not any(tensor.numel() for tensor in tensors.values()):
        raise ExportError(
            "the adapter has no weights, so it is not exported; check "
            "spec.method.lora.targetModules"
        )
    broken = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if broken:
        raise ExportError(
            f"{len(broken)} tensors of the adapter are not finite (first {broken[0]}), so it is "
            "not exported; lower spec.training.learningRate or use spec.training.precision fp32"
        )
    up = [tensor for name, tensor in tensors.items() if "lora_B" in name]
    if not any(bool(tensor.any()) for tensor in up):
        raise ExportError(
            "the adapter is all zero because training had no effect, so it is not exported; check "
            "spec.training.learningRate and that the rows have labels"
        )


def _data_hash(config: TrainConfig, warn: Callable[[str], None]) -> str | None:
    """Hash the training rows again; on failure, warn and return None."""
    from finetune_trainer.data.rules import Rules
    from finetune_trainer.data.source import open_rows

    cache, rules = Path(config.data.cache_dir), Rules.RELEASE_0_1_0  # a resumed run may use them
    try:
        return " ".join(
            open_rows(source, name="train", cache_dir=cache, rules=rules).fingerprint()
            for source in config.data.sources
        )
    except (TrainerError, OSError) as error:
        warn(f"the model card lacks the hash of the training data: {error}")
        return None
