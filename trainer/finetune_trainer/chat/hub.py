"""Find a base model in the hub's cache, so that no request is sent to the hub.

`__main__` calls it before torch is imported. Without a network, the library's requests fail only
after retries.
"""

from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from finetune_trainer.chat.screen import note
from finetune_trainer.config import ModelConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.model.weight_files import weight_files_in

_SECONDS = 4.0


def local_copy(model: ModelConfig) -> ModelConfig:
    """Return the folder of a model: its own or, if it is complete, its folder in the hub's cache.

    Raises:
        ConfigError: the model must be downloaded, and the hub does not respond or is turned off.
    """
    path = Path(model.path)
    if path.is_absolute() or path.is_dir():
        return model
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model.path, "config.json", revision=model.revision or "main")
    if isinstance(found, str):
        folder = Path(found).parent
        files = weight_files_in(folder)
        if files and all(file.is_file() for file in files):
            return ModelConfig(path=str(folder))
    _require_hub(model.path)
    note(f"downloading {model.path} from the hub")
    return model


def _require_hub(name: str) -> None:
    from huggingface_hub import constants

    fault = f"the base model {name} is neither a folder nor complete in the hub's cache"
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{fault}, and HF_HUB_OFFLINE is set; unset it")
    try:
        with urlopen(constants.ENDPOINT, timeout=_SECONDS):
            return
    except HTTPError:
        return  # the hub responds
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(
            f"{fault}, and {constants.ENDPOINT} cannot be reached ({reason}); connect to it, or "
            f"copy the model into the cache ({constants.HF_HUB_CACHE})"
        ) from error
