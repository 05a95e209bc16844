"""The environment of a node's main process: an allow-list of the caller's, and our own variables.

A secret such as HF_TOKEN travels here alone: never in a request, a file or a command line.
"""

from collections.abc import Mapping

from finetune_trainer.config import ENV_NODE_RANK, ENV_RDZV_ENDPOINT, ENV_TERMINATION_PATH

ENV_MARK = "FINETUNE_LOCAL_MARK"
"""Marks every process of an attempt, also those that made a session of their own."""

_NAMES = frozenset(
    {
        "HOME",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "LANG",
        "LD_LIBRARY_PATH",
        "NO_PROXY",
        "PATH",
        "PYTHONPATH",
        "REQUESTS_CA_BUNDLE",
        "SSL_CERT_DIR",
        "SSL_CERT_FILE",
        "TMPDIR",
        "TZ",
        "USER",
        "XDG_CACHE_HOME",
        "http_proxy",
        "https_proxy",
        "no_proxy",
    }
)
_PREFIXES = (
    "CUDA_",
    "FINETUNE_",
    "GLOO_",
    "HF_",
    "LC_",
    "NCCL_",
    "NVIDIA_",
    "TOKENIZERS_",
    "TORCH",
    "TRANSFORMERS_",
)
_OURS = frozenset({ENV_NODE_RANK, ENV_RDZV_ENDPOINT, ENV_TERMINATION_PATH, ENV_MARK})


def mark(uid: str, node: int | None = None) -> str:
    """Return the value of `ENV_MARK`, or of one attempt's every node the start that they share.

    The slashes end each part, so that no mark is the start of another attempt's or node's.
    """
    return f"{uid}/" if node is None else f"{uid}/{node}/"


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a node takes over from its caller.

    A launcher's RANK or WORLD_SIZE is not among it: the trainer would take itself for a rank.
    """
    taken = {
        name: value
        for name, value in environ.items()
        if (name in _NAMES or name.startswith(_PREFIXES)) and name not in _OURS
    }
    return without_current_folder(taken)


def without_current_folder(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of Python that imports nothing from the folder that it runs in."""
    made = {**environ, "PYTHONSAFEPATH": "1"}
    if "PYTHONPATH" in made:
        # An empty part, as in `export PYTHONPATH=$PYTHONPATH:/x`, means the current folder.
        made["PYTHONPATH"] = ":".join(part for part in made["PYTHONPATH"].split(":") if part)
    return made
