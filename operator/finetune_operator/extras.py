"""Which extra of this package contains a module that is not installed.

`ftctl` and `finetune-operator` use it when an import fails, so that users see a sentence instead of
a traceback.
"""

import re
from collections.abc import Sequence
from importlib import metadata

DISTRIBUTION = "finetune-operator"
# Module names that differ from their name on PyPI by more than hyphens.
_PROJECTS = {"azure": "azure-ai-ml", "pynvml": "nvidia-ml-py"}


def missing_extra(module: str, requirements: Sequence[str]) -> str | None:
    """Return the extra that contains a module; None if no extra does.

    Args:
        module: Its name, from the error of its import.
        requirements: Requirements of the package, from its metadata.
    """
    top = module.partition(".")[0]
    project = _PROJECTS.get(top, top).replace("_", "-").lower()
    for requirement in requirements:
        wanted, _, marker = requirement.partition(";")
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        name = re.match(r"[\w.-]+", wanted)
        if extra and name and name[0].replace("_", "-").lower() == project:
            return extra[1]
    return None


def sentence(program: str, error: ModuleNotFoundError) -> str | None:
    """Return how to install a module that a program lacks; None if it is part of this package.

    Args:
        program: The started program, such as `ftctl top`.
        error: The error of the import.
    """
    extra = missing_extra(error.name or "", metadata.requires(DISTRIBUTION) or [])
    if extra is None:
        return None
    return (
        f"{program} needs the package {error.name}, which is not installed; "
        f'pip install "{DISTRIBUTION}[{extra}]"'
    )
