"""Find a base model in the hub's cache, so that no request is sent to the hub.

`__main__` and `models` call it. Without a network, each request would fail only after retries.
"""

from pathlib import Path

from finetune_trainer.config import ModelConfig


def folder_of(model: ModelConfig) -> Path | None:
    """Return the folder of a model: its own or its folder in the hub's cache, if it has one."""
    path = Path(model.path)
    if path.is_absolute() or path.is_dir():
        return path
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model.path, "config.json", revision=model.revision or "main")
    return Path(found).parent if isinstance(found, str) else None
