"""Make runs bitwise reproducible on the same GPUs: `spec.training.deterministic`.

A GPU may add the parts of a sum in the order in which they finish, which differs from run to run.
Settings that libraries read from the environment are in `launch.cuda_environment`; the others are
here. A CPU always adds in the same order.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from finetune_trainer.errors import ConfigError

_NO_SUCH_KERNEL = re.compile(r"^(\S+) does not have a deterministic implementation")


@contextmanager
def deterministic(*, is_asked: bool) -> Iterator[None]:
    """Compute reproducibly in this block if `is_asked`.

    Raises:
        ConfigError: A required kernel has no deterministic implementation.
    """
    if not is_asked:
        yield
        return
    _choose_kernels()
    try:
        yield
    except RuntimeError as error:
        found = _NO_SUCH_KERNEL.match(str(error))
        if found is None:
            raise
        raise ConfigError(
            f"spec.training.deterministic is not possible: torch has no deterministic {found[1]} "
            "on this device; set it to false, or remove the setting that needs that kernel"
        ) from error


def _choose_kernels() -> None:
    """Restrict torch to deterministic kernels; it raises an error if an operation has none.

    FlashAttention 2 to 4 have a deterministic backward pass. torch's memory-efficient attention and
    cuDNN's have none, so a model with its own mask falls back to plain matrix products.
    """
    import torch

    torch.use_deterministic_algorithms(True)
    # No code here reads uninitialised memory; filling it would cost time at each gather.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
