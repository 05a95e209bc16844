"""What to do about a model's folder that a library could not read, by the files that are there."""

from collections.abc import Iterator
from pathlib import Path

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_TOKENIZERS = ("tokenizer*", "vocab*", "merges*", "*.model", "*.tiktoken", "tekken*")
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")


def about_weights(path: str) -> str:
    """Return the remedy for a folder without weights that can be read; empty where it has some."""
    folder = Path(path)
    if not folder.is_dir() or _first(folder, _WEIGHTS):
        return ""
    if pickle := _first(folder, _PICKLES):
        return (
            f"{pickle} is a pickle, which may hold code and is never read; load the model where "
            "you trust it, and save_pretrained writes safetensors"
        )
    if (folder / "adapter_config.json").is_file():
        return (
            "it holds an adapter and no model; name the model that it is for, and to go on with "
            "the adapter name its folder in spec.method.lora.startFrom"
        )
    return "it has no model.safetensors; copy the weights there"


def about_tokenizer(path: str) -> str:
    """Return the remedy for a folder without a tokenizer; empty where it has files of one."""
    folder = Path(path)
    if not folder.is_dir() or _first(folder, _TOKENIZERS):
        return ""
    return "it has no tokenizer.json; save the model's tokenizer there, too (save_pretrained)"


def _first(folder: Path, patterns: tuple[str, ...]) -> str:
    return next(_matching(folder, patterns), "")


def _matching(folder: Path, patterns: tuple[str, ...]) -> Iterator[str]:
    for pattern in patterns:
        yield from sorted(file.name for file in folder.glob(pattern))
