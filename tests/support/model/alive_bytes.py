"""Count the bytes of the storages that operators make, as long as each is alive.

It sees what operators return, real tensors or fake ones, and no scratch space inside a kernel.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class AliveBytes(TorchDispatchMode):
    """While entered, follow every storage that an operator returns.

    Attributes:
        now: Bytes of the storages that are alive.
        peak: The most that `now` was.
    """

    def __init__(self, *older: Tensor) -> None:
        """Leave out the storages of `older`: parameters and inputs."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in older)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._follow(tensor.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, size).atexit = False

    def _free(self, size: int) -> None:
        self.now -= size
