"""Resolve `mount://NAME/REST` in a configuration, locations whose paths only the node knows.

Azure ML chooses the paths of inputs and outputs and puts them into the command. `entry` reads them
there and inserts them into the configuration before it is used. `mount://scratch` is not a mount:
it is on the node's own disk, new for each start.
"""

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from finetune_trainer.config import ContractModel
from finetune_trainer.errors import ConfigError

SCRATCH = "scratch"
_ARGUMENT = re.compile(r"([a-z0-9_]+)=(.+)", re.DOTALL)
_PLACE = re.compile(r"mount://([a-z0-9_]+)(/.*)?", re.DOTALL)
# Fields that name a file or a folder; all others are the user's text.
_PATHS = {
    "cache_dir",
    "dir",
    "nvme_path",
    "path",
    "resume_from",
    "run_dir",
    "start_from",
    "termination_path",
}

M = TypeVar("M", bound=ContractModel)


def read_mounts(arguments: Iterable[str]) -> dict[str, str]:
    """Return the path of each mount by name, from arguments NAME=PATH.

    Raises:
        ConfigError: An argument is not NAME=PATH, or repeats a name.
    """
    mounts: dict[str, str] = {}
    for argument in arguments:
        match = _ARGUMENT.fullmatch(argument)
        if match is None:
            raise ConfigError(
                f"the argument {argument!r} is not NAME=PATH with a name of a-z, 0-9 and _, such "
                "as 'model=${{inputs.model}}'; correct the command of the job"
            )
        name, path = match.groups()
        if name in mounts:
            raise ConfigError(f"two arguments name the mount {name}; remove one of them")
        mounts[name] = path
    return mounts


def resolve_mounts(model: M, mounts: Mapping[str, str]) -> M:
    """Return a configuration, or a part of it, with locations on mounts replaced by paths.

    Raises:
        ConfigError: A location is on a mount that is not in `mounts`.
    """

    def put(name: str, value: object) -> object:
        if isinstance(value, ContractModel):
            return resolve_mounts(value, mounts)
        if isinstance(value, tuple):
            return tuple(put("", one) for one in value)
        if name in _PATHS and isinstance(value, str) and value.startswith("mount://"):
            return _path(value, mounts)
        return value

    return model.model_copy(update={name: put(name, value) for name, value in model})


def _path(place: str, mounts: Mapping[str, str]) -> str:
    match = _PLACE.fullmatch(place)
    if match is None:
        raise ConfigError(
            f"{place} is not mount://NAME or mount://NAME/REST with a name of a-z, 0-9 and _"
        )
    name, rest = match.groups()
    if name not in mounts:
        given = ", ".join(f"{one}=" for one in mounts) or "none"
        raise ConfigError(
            f"{place}: no argument of the command gives the path of {name} (given: "
            f"{given}); add {name}=PATH"
        )
    return mounts[name].rstrip("/") + (rest or "")
