"""Find the weight files in the folder of a model. It imports no library."""

import json
from pathlib import Path


def weight_files_in(folder: Path) -> list[Path]:
    """Return the weight files that transformers would load."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        return [folder / name for name in sorted(names)]
    return sorted(folder.glob("*.safetensors"))
