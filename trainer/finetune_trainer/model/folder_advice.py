"""Explain why a model cannot be used, with a remedy that depends on its files."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune_trainer.config import ModelConfig
from finetune_trainer.control import is_out_of_memory
from finetune_trainer.errors import ConfigError, TrainerError
from finetune_trainer.refusals import Refusals

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_TOKENIZERS = ("tokenizer*", "vocab*", "merges*", "*.model", "*.tiktoken", "tekken*")
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")


def about_weights(path: str) -> str:
    """Return the remedy for a folder without readable weights; empty if it has some."""
    folder = Path(path)
    if not folder.is_dir() or _first(folder, _WEIGHTS):
        return ""
    if pickle := _first(folder, _PICKLES):
        return (
            f"{pickle} is a pickle, which may contain code and is never read; load the model "
            "on a machine where you trust it and write safetensors with save_pretrained"
        )
    if (folder / "adapter_config.json").is_file():
        return (
            "it holds an adapter and no model; use the base model of the adapter, and to continue "
            "training the adapter set spec.method.lora.startFrom to its folder"
        )
    return "it has no model.safetensors; copy the weights there"


def refuse_model_with_adapter(config: ModelConfig, folder: Path, refusals: Refusals) -> None:
    """Refuse a new run on a base that holds an adapter beside its weights.

    transformers would load the base that the adapter names, and the adapter into it.

    Raises:
        ConfigError: the run is new, and the folder or the repository has both.
    """
    if not (folder / "adapter_config.json").is_file() or not _first(folder, _WEIGHTS):
        return
    refusals.refuse(
        ConfigError(
            f"spec.model.source {config.path} holds a model and an adapter (adapter_config.json), "
            "so it is not known which to train; move the adapter to another folder. To "
            "continue training the adapter, set spec.model.source to its base and "
            "spec.method.lora.startFrom to its folder; to train on top of it, merge it first"
        )
    )


def about_tokenizer(path: str) -> str:
    """Return the remedy for a folder without a tokenizer; empty if it has tokenizer files."""
    folder = Path(path)
    if not folder.is_dir() or _first(folder, _TOKENIZERS):
        return ""
    return "it has no tokenizer.json; save the model's tokenizer there, too (save_pretrained)"


@contextmanager
def explained(subject: str, advice: Callable[[], str] | None = None) -> Iterator[None]:
    """Convert any exception of a library that reads `subject` into a ConfigError.

    A damaged file may raise any class of error (of safetensors, a missing key, a wrong type), and
    the next attempt would fail in the same way. Out-of-memory errors pass unchanged. `advice`
    returns a specific remedy, or an empty string for the general one.
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
            reason = f"{type(error).__name__}: {reason}"  # the text of a KeyError is only the key
        remedy = (advice() if advice is not None else "") or (
            "check the name, the revision, that its files are complete and, for a gated model, the "
            "token"
        )
        raise ConfigError(f"{subject} cannot be loaded ({reason}); {remedy}") from error


def _first(folder: Path, patterns: tuple[str, ...]) -> str:
    return next(_matching(folder, patterns), "")


def _matching(folder: Path, patterns: tuple[str, ...]) -> Iterator[str]:
    for pattern in patterns:
        yield from sorted(file.name for file in folder.glob(pattern))
