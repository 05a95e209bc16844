"""Take over results of a layer's first pass when the backward pass runs it a second time.

Used by `recompute` where layers are not compiled. `torch.utils.checkpoint` forgets every tensor
that autograd saves in the first pass, and runs the layer again to have them. A function that is
kept saves its own for good (the innermost hooks win), and in the second pass returns what it did
in the first: that pass is run for the tensors that it saves, and its graph is thrown away. The
host pays for each function that is kept; with a dispatch mode it pays for each operator, which
took it 3.8 times as long as no recomputation.
"""

import threading
from collections.abc import Callable
from functools import partial, wraps
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from finetune_trainer.errors import TrainerError


class _Pass:
    """While entered, the pass that this thread runs; backward has threads of its own."""

    def __init__(self, results: list[tuple[Any, ...]], *, is_second: bool) -> None:
        self._results, self._is_second = results, is_second
        self._next = 0
        self._outer: _Pass | None = None

    def __enter__(self) -> None:
        self._next = 0
        self._outer = getattr(_THREAD, "current", None)
        _THREAD.current = self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _THREAD.current, self._outer = self._outer, None

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function in the first pass, return in the second what it returned."""
        if self._is_second:
            self._next += 1
            return _again(*self._results[self._next - 1])
        with saved_tensors_hooks(_itself, _itself):
            result = function(*args, **kwargs)
        self._results.append(_noted(result))
        return result


_THREAD = threading.local()


def two_passes() -> tuple[_Pass, _Pass]:
    """Return the contexts of a layer's two passes, for `torch.utils.checkpoint`."""
    results: list[tuple[Any, ...]] = []
    return _Pass(results, is_second=False), _Pass(results, is_second=True)


def keep_product(module: nn.Module) -> None:
    """Keep what a module returns, a tensor.

    Its backward pass must need no tensor but parameters, or those tensors are kept as well.
    """
    module.forward = partial(_run, module.forward)


def keep_attention(base: Any) -> None:
    """Keep the result of the attention that a transformers model has been given.

    Attention that a model has in its own file is computed again, and so is one with dropout: a
    second pass without it would draw other random numbers afterwards.
    """
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = base.config._attn_implementation
    attend = ALL_ATTENTION_FUNCTIONS.get(name)
    if attend is None or hasattr(attend, "is_kept"):
        return

    @wraps(attend)
    def attend_once(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dropout"):
            return attend(*args, **kwargs)
        return _run(attend, *args, **kwargs)

    attend_once.is_kept = True  # type: ignore[attr-defined]
    AttentionInterface.register(name, attend_once)


def _run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    current: _Pass | None = getattr(_THREAD, "current", None)
    if current is None:
        return function(*args, **kwargs)
    return current.run(function, *args, **kwargs)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _noted(result: Any) -> tuple[Any, ...]:
    if isinstance(result, tuple):
        return tuple, [_noted(part) for part in result]
    if not isinstance(result, Tensor):
        return None, result
    return Tensor, result.detach(), result.requires_grad, result._version


def _again(kind: Any, *noted: Any) -> Any:
    if kind is tuple:
        return tuple(_again(*part) for part in noted[0])
    if kind is None:
        return noted[0]
    kept, requires_grad, version = noted
    if kept._version != version:
        raise TrainerError(
            "spec.strategy.activationCheckpointing selective: this model changes in place what a "
            "layer's product or attention returns; use full or none"
        )
    return kept.detach().requires_grad_(requires_grad)
