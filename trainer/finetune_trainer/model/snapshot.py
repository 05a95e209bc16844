"""Find a base model as a folder of this machine, and download its files from the hub if needed.

Libraries get the absolute path of a snapshot and never a name, which they would also look up in the
current folder. Only files that loading and export read are downloaded, and weights only on nodes
that load them. `rank` lets one rank of each node download, so that the others find the files.
"""

import glob
import os
from pathlib import Path

from finetune_trainer.cache_locks import PATIENCE_SECONDS, hub_locks_broken
from finetune_trainer.config import ModelConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.links import check_place
from finetune_trainer.model.folder_advice import about_weights, explained
from finetune_trainer.model.weight_files import INDEX, WHOLE, weight_files_in

TOKENIZER_FILES = (
    "*.model",
    "*.tiktoken",
    "added_tokens.json",
    "additional_chat_templates/*.jinja",
    "chat_template*",
    "merges*",
    "special_tokens_map.json",
    "tekken*",
    "tokenizer*",
    "vocab*",
)
"""Files of tokenizers of all kinds, as patterns."""
PROCESSOR_FILES = "*processor_config.json"
ADAPTER_CONFIG = "adapter_config.json"
_SETTINGS = ("config.json", "generation_config.json", ADAPTER_CONFIG, INDEX, PROCESSOR_FILES)


def model_folder(config: ModelConfig, patience_seconds: float = PATIENCE_SECONDS) -> Path:
    """Return the folder of a model with its settings and its tokenizer.

    Locks of downloads that make no progress for `patience_seconds` are broken.

    Raises:
        ConfigError: the hub does not have the model or cannot be reached, or a link in the hub's
            cache leads out of its volume.
    """
    path = Path(config.path)
    if path.is_absolute():
        return path
    return _download(config, (*_SETTINGS, *TOKENIZER_FILES), patience_seconds)


def folder_with_weights(config: ModelConfig, patience_seconds: float = PATIENCE_SECONDS) -> Path:
    """Return the folder of a model with all files that are read; see `model_folder`.

    Raises:
        ConfigError: as `model_folder`; or the repository has no safetensors weights.
    """
    folder = model_folder(config, patience_seconds)
    if Path(config.path).is_absolute():
        return folder
    _download(config, (WHOLE, INDEX), patience_seconds)
    files = weight_files_in(folder)
    if not (folder / WHOLE).is_file() and not (folder / INDEX).is_file():
        if (folder / ADAPTER_CONFIG).is_file():
            raise ConfigError(f"spec.model.source {config.path}: {about_weights(str(folder))}")
        raise ConfigError(
            f"spec.model.source {config.path} has no {WHOLE} at revision "
            f"{config.revision or 'main'}; name a revision or a repository with safetensors, "
            "because other formats may contain code and are never read"
        )
    names = tuple(glob.escape(file.relative_to(folder).as_posix()) for file in files)
    return _download(config, names, patience_seconds)


def _download(config: ModelConfig, patterns: tuple[str, ...], patience_seconds: float) -> Path:
    """Download the files of a repository that match `patterns`, and return its folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()  # a bar per rank would interleave with the run's own lines
    name, revision = config.path, config.revision or "main"
    locks = hub_locks_broken("model", name, patience_seconds)
    with explained(f"spec.model.source: the model of {name}"), locks:
        folder = snapshot_download(name, revision=revision, allow_patterns=list(patterns))
    check_place("spec.model.source", Path(folder), os.environ)
    return Path(folder)
