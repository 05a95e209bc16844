"""Processes forked from one that has imported what ranks need.

A fresh interpreter takes seconds to import it, a forked one nothing. A test process has a single
fork server, and what that imports is settled when it starts: so every test asks for it here.
DeepSpeed, which would change every process it is in, is imported by one that forks others in turn.
"""

import importlib
import multiprocessing as mp
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing.context import ForkContext, ForkServerContext
from typing import TypeVar

Forks = ForkContext | ForkServerContext
T = TypeVar("T")

IMPORTED = (
    "finetune_trainer.launch.worker",
    "finetune_trainer.rank",
    "peft",
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.summary.writer.event_file_writer",
    "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama",
)
"""Installed modules alone: the server does not look beside the tests, and skips what is missing."""


@cache
def forkserver() -> ForkServerContext:
    """Return the context whose processes have all of `IMPORTED`."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


def beside_deepspeed(work: Callable[[Forks], T]) -> T:
    """Return what `work` does with the context whose processes have DeepSpeed as well."""
    return _with_deepspeed().submit(_with_own_forks, work).result()


def _with_own_forks(work: Callable[[Forks], T]) -> T:
    return work(mp.get_context("fork"))


@cache
def _with_deepspeed() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=forkserver(), initializer=_import_deepspeed)


def _import_deepspeed() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"  # it chooses once for the whole process
    importlib.import_module("deepspeed")
