"""Find the weight files in the folder of a model, without torch and transformers."""

import json
from pathlib import Path

from finetune_trainer.config import is_below
from finetune_trainer.errors import ConfigError

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weight_files_in(folder: Path) -> list[Path]:
    """Return the weight files that transformers would load.

    Raises:
        ConfigError: the index names a file that is not below the folder.
    """
    whole, index = folder / WHOLE, folder / INDEX
    if whole.is_file():
        return [whole]
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        for name in names:
            if not is_below(name):
                raise ConfigError(
                    f"spec.model.source: {index} names {name}, which is not a file below this "
                    "folder; correct the index"
                )
        return [folder / name for name in sorted(names)]
    return sorted(folder.glob("*.safetensors"))
