"""Load tokenizer and base model as transformers models; no remote code is ever run.

Called by `rank`. Knows nothing of strategies: it returns an unwrapped model on the CPU or GPU.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_trainer.config import ModelConfig, TrainConfig
from finetune_trainer.control import is_out_of_memory
from finetune_trainer.errors import ConfigError, TrainerError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Names under which model configurations keep the dropout of their own layers.
_DROPOUT_FIELDS = (
    "attention_dropout",
    "attn_pdrop",
    "dropout",
    "embd_pdrop",
    "hidden_dropout",
    "resid_pdrop",
)


def load_tokenizer(config: ModelConfig) -> "PreTrainedTokenizerBase":
    """Load the model's tokenizer; a missing padding token becomes the end token.

    Raises:
        ConfigError: the model or its tokenizer cannot be found or read.
    """
    from transformers import AutoTokenizer

    with _explained("tokenizer", config):
        tokenizer = AutoTokenizer.from_pretrained(
            config.path, revision=config.revision or "main", trust_remote_code=False
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(config: TrainConfig, device: "torch.device") -> "PreTrainedModel":
    """Load the base model for training: parameters that are trained in fp32, frozen ones narrow.

    With adapters and bf16 the frozen base is kept in bf16, which halves its memory; with full
    fine-tuning every parameter stays in fp32 and autocast narrows the arithmetic alone.

    Raises:
        ConfigError: the model cannot be found or read, or `training.dropout` has no effect on it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # one bar a rank would be interleaved with what the run tells
    narrow = config.method.type == "lora" and config.training.precision == "bf16"
    source = config.model
    with _explained("model", source):
        settings = AutoConfig.from_pretrained(
            source.path, revision=source.revision or "main", trust_remote_code=False
        )
        _set_dropout(settings, config.training.dropout)
        model = AutoModelForCausalLM.from_pretrained(
            source.path,
            revision=source.revision or "main",
            config=settings,
            dtype=torch.bfloat16 if narrow else torch.float32,
            attn_implementation="sdpa",
            trust_remote_code=False,
            use_safetensors=True,
        )
    if config.strategy.activation_checkpointing == "full":
        # Non-reentrant recomputation works with frozen inputs and under DDP's hooks.
        model.activation_checkpointing_enable({"use_reentrant": False})
    model = model.to(device)
    model.train()
    return model


def base_name(config: ModelConfig) -> str | None:
    """Return the name another machine can load the base by, or None when nothing tells it."""
    if config.base_name:
        return config.base_name
    folder = Path(config.path)
    if not folder.is_dir():
        return config.path
    recorded = json.loads((folder / "config.json").read_text()).get("_name_or_path")
    return recorded if recorded and not Path(recorded).is_absolute() else None


def model_fingerprint(config: ModelConfig) -> str:
    """Identify the base model: hub name and revision, or a folder's configuration and weights.

    Weights count by name and size: hashing gigabytes at every start would cost more than the
    mistake it guards against, as another model differs in its configuration too.
    """
    folder = Path(config.path)
    if not folder.is_dir():
        return f"{config.path}@{config.revision or 'main'}"
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name}:{file.stat().st_size}".encode())
    return digest.hexdigest()


def _set_dropout(settings: object, dropout: float | None) -> None:
    if dropout is None:
        return
    present = [name for name in _DROPOUT_FIELDS if hasattr(settings, name)]
    if not present:
        raise ConfigError(
            f"spec.training.dropout {dropout} has no effect: this model has no dropout of its own; "
            "remove it (spec.method.lora.dropout acts on adapters)"
        )
    for name in present:
        setattr(settings, name, dropout)


@contextmanager
def _explained(part: str, config: ModelConfig) -> Iterator[None]:
    """Turn whatever a library raises while it reads the model into a sentence.

    A damaged file shows as an error of any kind (of safetensors, a missing key, a wrong type), and
    the next attempt would meet it again. Want of memory is another matter, and told as such.
    """
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        if lines and not isinstance(error, (OSError, ValueError)):
            reason = f"{type(error).__name__}: {reason}"  # a missing key says no more than its name
        raise ConfigError(
            f"spec.model.source: the {part} of {config.path} cannot be loaded ({reason}); check "
            "the name, the revision, that its files are whole and, for a gated model, the token"
        ) from error
