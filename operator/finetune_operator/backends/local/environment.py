"""The environment of a node's main process: variables of the caller and of the backend.

Secrets such as HF_TOKEN are passed only this way: never in a request, a file or a command line.
"""

from collections.abc import Mapping

from finetune_trainer.config import (
    ENV_NODE_NAME,
    ENV_NODE_RANK,
    ENV_RDZV_ENDPOINT,
    ENV_RDZV_KEY,
    ENV_TERMINATION_PATH,
    ENV_VOLUMES,
)

ENV_MARK = "FINETUNE_LOCAL_MARK"
"""Variable that marks every process of an attempt, including processes with their own session."""

_NAMES = frozenset(
    {"HOME", "HTTP_PROXY", "HTTPS_PROXY", "LANG", "LD_LIBRARY_PATH", "NO_PROXY", "PATH",
     "PYTHONPATH", "REQUESTS_CA_BUNDLE", "SSL_CERT_DIR", "SSL_CERT_FILE", "TMPDIR", "TZ", "USER",
     "XDG_CACHE_HOME", "http_proxy", "https_proxy", "no_proxy"}
)  # fmt: skip
_PREFIXES = (
    "CUDA_", "FINETUNE_", "GLOO_", "HF_", "LC_", "NCCL_", "NVIDIA_", "TOKENIZERS_", "TORCH",
    "TRANSFORMERS_",
)  # fmt: skip
_OURS = frozenset(
    {
        ENV_NODE_NAME,
        ENV_NODE_RANK,
        ENV_RDZV_ENDPOINT,
        ENV_RDZV_KEY,
        ENV_TERMINATION_PATH,
        ENV_VOLUMES,
        ENV_MARK,
    }
)


def mark(uid: str, node: int | None = None) -> str:
    """Return the value of `ENV_MARK` of a node, or the prefix that all nodes of an attempt share.

    Each part ends with a slash, so that no mark is a prefix of another attempt's or node's.
    """
    return f"{uid}/" if node is None else f"{uid}/{node}/"


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a node inherits from its caller.

    RANK and WORLD_SIZE of a launcher are excluded, because with them the trainer would act as a
    rank.
    """
    taken = {
        name: value
        for name, value in environ.items()
        if (name in _NAMES or name.startswith(_PREFIXES)) and name not in _OURS
    }
    return without_current_folder(taken)


def without_current_folder(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Python does not import from its current folder."""
    environment = {**environ, "PYTHONSAFEPATH": "1"}
    if "PYTHONPATH" in environment:
        # An empty part, as in `export PYTHONPATH=$PYTHONPATH:/x`, means the current folder.
        environment["PYTHONPATH"] = ":".join(
            part for part in environment["PYTHONPATH"].split(":") if part
        )
    return environment
