"""Which extra of this package brings a module that is not installed.

`ftctl` and `finetune-operator` ask it when an import fails, so that nobody reads a traceback.
"""

import re
from collections.abc import Sequence
from importlib import metadata

DISTRIBUTION = "finetune-operator"
# Where the name on PyPI differs from that of the module by more than hyphens.
_PROJECTS = {"azure": "azure-ai-ml", "pynvml": "nvidia-ml-py"}


def missing_extra(module: str, requirements: Sequence[str]) -> str | None:
    """Return the extra that brings a module; None where none does.

    Args:
        module: Its name, as the error of its import has it.
        requirements: What the package asks for, as its metadata has it.
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
    """Return what to install for a program that lacks a module; None where that is our own fault.

    Args:
        program: What was started, such as `ftctl top`.
        error: What its import has raised.
    """
    extra = missing_extra(error.name or "", metadata.requires(DISTRIBUTION) or [])
    if extra is None:
        return None
    return (
        f"{program} needs the package {error.name}, which is not installed; "
        f'pip install "{DISTRIBUTION}[{extra}]"'
    )
