"""Kill, stop or freeze the process at named places, so that tests can prove that no state is lost.

All parts of the trainer call `failpoint`, which reads one environment variable and does nothing
unless it names the place. This module must not import torch, because some places are reached before
that import.
"""

import os
import re
import signal
from typing import Literal, get_args

from finetune_trainer.errors import ConfigError

ENV_FAILPOINT = "FINETUNE_FAILPOINT"  # comma-separated NAME[@STEP][:rank=R][:SIGNAL]
ENV_FAILPOINT_ONCE = "FINETUNE_FAILPOINT_ONCE"  # folder with a marker file for each kill

FailPoint = Literal[
    "loading",
    "tokenizing",
    "storing-tokens",
    "restoring",
    "evaluating",
    "first-step",
    "mid-accumulation",
    "before-optimizer",
    "after-optimizer",
    "saving",
    "before-manifest",
    "before-commit",
    "after-commit",
    "retention",
    "answering",
    "exporting",
    "before-publish",
]
POINTS: tuple[str, ...] = get_args(FailPoint)

_SYNTAX = re.compile(
    r"(?P<name>[a-z-]+)(?:@(?P<step>\d+))?(?::rank=(?P<rank>\d+))?(?::(?P<signal>SIGTERM|SIGSTOP))?"
)
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK")


def failpoint(name: FailPoint, step: int = 0) -> None:
    """Kill this process with SIGKILL if the environment names this place.

    `FINETUNE_FAILPOINT=saving@20:rank=1` kills rank 1 while it saves step 20; without a step or a
    rank, the first occurrence counts. `:SIGTERM` or `:SIGSTOP` at the end selects another signal.
    Commas separate several places. If `FINETUNE_FAILPOINT_ONCE` names a folder, each place kills
    only once: it writes a marker file there before the kill, so the next attempt passes.

    Raises:
        ConfigError: The environment names an unknown place.
    """
    wanted = os.environ.get(ENV_FAILPOINT)
    if not wanted:
        return
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0")
    for text in wanted.split(","):
        target = _parse(text)
        is_here = target["name"] == name and target["step"] in (None, str(step))
        if is_here and target["rank"] in (None, rank) and _claim_kill(text):
            os.kill(os.getpid(), signal.Signals[target["signal"] or "SIGKILL"])


def _parse(text: str) -> re.Match[str]:
    match = _SYNTAX.fullmatch(text)
    if match is None or match["name"] not in POINTS:
        raise ConfigError(
            f"{ENV_FAILPOINT} {text!r} is not a failpoint; write "
            f"NAME[@STEP][:rank=R][:SIGTERM|:SIGSTOP] with one of {', '.join(POINTS)}"
        )
    return match


def _claim_kill(target: str) -> bool:
    folder = os.environ.get(ENV_FAILPOINT_ONCE)
    if not folder:
        return True
    os.makedirs(folder, exist_ok=True)
    try:
        os.close(os.open(os.path.join(folder, target), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True
