"""Copy the tensors that the trained class does not read from the base into an exported model.

`output` calls it for a model that has been saved. A base with a vision tower that was trained as a
language model keeps its architecture, the names of its tensors and the settings of its processor.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune_trainer.model.snapshot import PROCESSOR_FILES
from finetune_trainer.model.unread import Unread

_INDEX = "model.safetensors.index.json"
_OF_THE_RUN = ("architectures", "quantization_config", "transformers_version")
"""Keys of a saved `config.json` that its part in the base's `config.json` does not get."""


def add_unread(folder: Path, base: Path, unread: Unread, max_shard_bytes: int) -> None:
    """Complete the exported model in `folder` with what its class does not read from `base`.

    Args:
        folder: Folder with config and weights.
        base: Folder of the base model.
        unread: Tensors of the base that the class does not read.
        max_shard_bytes: Size above which the tensors are written as several files.

    Raises:
        OSError: the disk is full or fails.
    """
    for path in base.glob(PROCESSOR_FILES):
        shutil.copyfile(path, folder / path.name)
    if unread.is_quantised:
        return
    is_part = restore_architecture(folder / "config.json", base / "config.json")
    shards = sorted(folder.glob("model*.safetensors"))
    if is_part:
        for shard in shards:
            _rename(shard, unread)
    if unread.extra:
        for number, tensors in enumerate(_parts(unread.extra, max_shard_bytes)):
            shards.append(folder / f"model-unread-{number}.safetensors")
            _save(tensors, shards[-1])
        _write_index(folder, shards)


def restore_architecture(path: Path, base_path: Path) -> bool:
    """Write the `config.json` of a part of the base into its place in the base's `config.json`.

    Returns whether the model is such a part; the file of any other model does not change.
    """
    saved, base = json.loads(path.read_text()), json.loads(base_path.read_text())
    kind = saved.get("model_type")
    parts = (
        key
        for key, part in base.items()
        if isinstance(part, dict) and part.get("model_type") == kind != base.get("model_type")
    )
    name = next(parts, None)
    if name is None:
        return False
    part = {key: value for key, value in saved.items() if key not in _OF_THE_RUN}
    base.pop("quantization_config", None)
    for key in ("dtype", "torch_dtype", "vocab_size", "transformers_version"):
        if key in base and key in saved:
            base[key] = saved[key]
    whole = base | {name: base[name] | part}
    path.write_text(json.dumps(whole, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    return True


def _rename(shard: Path, unread: Unread) -> None:
    """Give tensors the prefix that their names have in the base."""
    from safetensors.torch import load_file

    tensors = load_file(shard)
    named = {
        name if name in unread.names else _prefixed(name, unread): tensor
        for name, tensor in tensors.items()
    }
    if named.keys() != tensors.keys():
        _save(named, shard)


def _prefixed(name: str, unread: Unread) -> str:
    longer = f"{unread.prefix}.{name}"
    return longer if longer in unread.names else name


def _parts(extra: Mapping[str, Path], max_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield the tensors, read from their files, in groups of at most `max_bytes`."""
    from safetensors import safe_open

    part: dict[str, Any] = {}
    size = 0
    for name, file in extra.items():
        with safe_open(file, framework="pt") as opened:
            tensor = opened.get_tensor(name)
        if part and size + tensor.nbytes > max_bytes:
            yield part
            part, size = {}, 0
        part[name], size = tensor, size + tensor.nbytes
    yield part


def _save(tensors: dict[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})


def _write_index(folder: Path, shards: list[Path]) -> None:
    """Name the shards as transformers does, and write their index."""
    from safetensors import safe_open

    sizes: dict[str, int] = {}
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        shard.rename(folder / name)
        with safe_open(folder / name, framework="pt") as opened:
            files |= dict.fromkeys(opened.keys(), name)
            sizes |= {key: opened.get_tensor(key).nbytes for key in opened.keys()}  # noqa: SIM118
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
    (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
