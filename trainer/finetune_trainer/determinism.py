"""The same bits in each run on the same GPUs: `spec.training.deterministic`.

On a GPU, parts of a sum may be added in the order in which they happen to be ready. What the
libraries read from the environment is set by `launch.cuda_environment`; the rest is here. A CPU
adds up in one order anyway.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from finetune_trainer.errors import ConfigError

_NO_SUCH_KERNEL = re.compile(r"^(\S+) does not have a deterministic implementation")


@contextmanager
def deterministic(*, is_asked: bool) -> Iterator[None]:
    """Compute the same bits each time in this block, where that is asked for.

    Raises:
        ConfigError: a kernel that the block needs cannot.
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
            "on this device; set it to false, or leave out what needs that kernel"
        ) from error


def _choose_kernels() -> None:
    """Let torch take kernels that add up in one order, and raise where there is none.

    FlashAttention 2 to 4 have a backward pass for it. torch's memory-efficient attention and
    cuDNN's have none, so a model that brings its own mask falls back to plain products.
    """
    import torch

    torch.use_deterministic_algorithms(True)
    # Memory that is not written yet is read by nobody here; to fill it takes time at each gather.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
