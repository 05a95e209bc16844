"""Reuse results of a layer's first pass when the backward pass recomputes the layer.

Used by `recompute` if layers are not compiled. `torch.utils.checkpoint` drops every tensor that
autograd saves in the first pass, and reruns the layer to restore them. A retained function keeps
its saved tensors, because the innermost hooks take precedence. In the second pass it returns the
results of the first pass, because that pass only restores saved tensors and its graph is discarded.
It costs host time only for each retained function. A dispatch mode costs host time for each
operator, with which a step took 3.8 times as long as without recomputation.
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
    """Context of the pass that this thread runs; backward runs in threads of its own."""

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
        """Call the function in the first pass, and return its result in both passes."""
        if self._is_second:
            self._next += 1
            return _restored(*self._results[self._next - 1])
        with saved_tensors_hooks(_identity, _identity):
            result = function(*args, **kwargs)
        self._results.append(_recorded(result))
        return result


_THREAD = threading.local()


def two_passes() -> tuple[_Pass, _Pass]:
    """Return the contexts of a layer's two passes, for `torch.utils.checkpoint`."""
    results: list[tuple[Any, ...]] = []
    return _Pass(results, is_second=False), _Pass(results, is_second=True)


def keep_product(module: nn.Module) -> None:
    """Retain the result of a module, a tensor.

    Its backward pass should need only parameters; any other tensor that it needs is retained, too.
    """
    module.forward = partial(_run, module.forward)


def keep_attention(base: Any) -> None:
    """Retain the result of the attention function selected for a transformers model.

    Attention implemented in the model's own file is recomputed. Attention with dropout is, too: a
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
        return attend(*args, **kwargs) if kwargs.get("dropout") else _run(attend, *args, **kwargs)

    attend_once.is_kept = True  # type: ignore[attr-defined]
    AttentionInterface.register(name, attend_once)


def _run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    current: _Pass | None = getattr(_THREAD, "current", None)
    if current is None:
        return function(*args, **kwargs)
    return current.run(function, *args, **kwargs)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _recorded(result: Any) -> tuple[Any, ...]:
    if isinstance(result, tuple):
        return tuple, [_recorded(part) for part in result]
    if not isinstance(result, Tensor):
        return None, result
    return Tensor, result.detach(), result.requires_grad, result._version


def _restored(kind: Any, *recorded: Any) -> Any:
    if kind is tuple:
        return tuple(_restored(*part) for part in recorded[0])
    if kind is None:
        return recorded[0]
    tensor, requires_grad, version = recorded
    if tensor._version != version:
        raise TrainerError(
            "spec.strategy.activationCheckpointing selective: this model modifies the result of a "
            "layer's product or attention in place; use full or none"
        )
    return tensor.detach().requires_grad_(requires_grad)
