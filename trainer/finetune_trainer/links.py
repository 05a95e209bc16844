"""Refuse symbolic links that lead out of the volume through which they were reached.

`launch.worker` calls it on each node before a folder is read or written. Each volume of a pod has
its own writers, so a link on one volume must not have the trainer read or write another volume or
the pod's own files. Outside of pods no volumes are named, and a link may lead anywhere.
"""

import errno
import os
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

from finetune_trainer.config import ENV_VOLUMES, TrainConfig
from finetune_trainer.errors import ConfigError

_WHOLE = 64
"""Levels of folders in which links are checked, if all of their files may be read."""


def check_links(config: TrainConfig, environ: Mapping[str, str]) -> None:
    """Refuse a configuration with a path that leads out of its volume through a link.

    Raises:
        ConfigError: the path, or a link in its folder, leads to another volume; or the path leads
            back to itself.
    """
    for field, path, levels in _places(config):
        if leads_back(path):
            raise ConfigError(
                f"{field} {path} is a symbolic link that leads back to itself; remove the link, "
                "and name the file or the folder itself"
            )
        check_place(field, path, environ, levels=levels)


def leads_back(path: Path) -> bool:
    """Whether a path cannot be followed because its symbolic links form a loop."""
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def check_place(
    field: str, path: Path, environ: Mapping[str, str], *, levels: int = _WHOLE
) -> None:
    """Refuse a path that leads out of its volume, also by a link below it.

    Args:
        field: Field of the manifest that names the path; messages begin with it.
        path: File or folder; it need not exist.
        environ: Environment with the mount paths of the volumes.
        levels: Levels of folders below `path` in which links are checked.

    Raises:
        ConfigError: the path or a link leads to another volume.
    """
    roots = [one for one in environ.get(ENV_VOLUMES, "").split(":") if one]
    volume = _volume_of(os.path.normpath(path.absolute()), roots)
    if volume is None:
        return
    real_roots = [os.path.realpath(one) for one in roots]
    pending, seen = deque([(str(path), levels)]), set()
    while pending:
        place, left = pending.popleft()
        target = os.path.realpath(place)
        if _volume_of(target, real_roots) != os.path.realpath(volume):
            raise ConfigError(
                f"{field} {path}: {place} leads to {target} through a symbolic link, out of the "
                f"volume {volume}; replace the link by a copy of the file or the folder"
            )
        if left and target not in seen and os.path.isdir(target):
            seen.add(target)
            pending += [(one, left - 1) for one in _links_and_folders(target, real_roots)]


def _links_and_folders(folder: str, roots: list[str]) -> Iterator[str]:
    """Yield the links and folders in a folder, except the mount paths of other volumes."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                is_folder = entry.is_dir(follow_symlinks=False)
                if entry.is_symlink() or (is_folder and entry.path not in roots):
                    yield entry.path
    except (FileNotFoundError, PermissionError):
        return  # deleted meanwhile, or the trainer cannot read it either


def _volume_of(path: str, roots: list[str]) -> str | None:
    """Return the innermost mount path that contains `path`; None if no volume does."""
    around = [one for one in roots if Path(path).is_relative_to(one)]
    return max(around, key=len, default=None)


def _places(config: TrainConfig) -> Iterator[tuple[str, Path, int]]:
    """Yield the paths of a run, each with its field and the levels in which links are checked."""
    data, lora, checkpoint = config.data, config.method.lora, config.checkpoint
    sources = [("spec.dataset.source", data.train)]
    sources += [
        (f"spec.dataset.also[{number}].source", one) for number, one in enumerate(data.also)
    ]
    if data.eval is not None:
        sources.append(("spec.dataset.evalSource", data.eval))
    for field, source in sources:
        if not source.is_hub:
            yield field, Path(source.path), 1
    if Path(config.model.path).is_absolute():
        yield "spec.model.source", Path(config.model.path), _WHOLE
    if lora is not None and lora.start_from is not None:
        yield "spec.method.lora.startFrom", Path(lora.start_from), _WHOLE
    if checkpoint.resume_from not in ("auto", "none"):
        yield "spec.checkpoint.resumeFrom", Path(checkpoint.resume_from), _WHOLE
    yield "spec.checkpoint.uri", Path(checkpoint.dir), _WHOLE
    yield "spec.output.uri", Path(config.output.dir), 2
    yield "the run directory", Path(config.run_dir), 2
    yield "the cache", Path(data.cache_dir), 2  # a level for the locks of the token cache
    if config.strategy.nvme_path is not None:
        yield "spec.strategy.nvmePath", Path(config.strategy.nvme_path), 1
