"""Compile decoder layers one by one; layers of the same kind share a graph.

Called by `parallelize`. If compilation is only the default, a model that cannot be compiled is
trained without it, with one warning. If a manifest requests compilation, the model is refused.
"""

import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from finetune_trainer.errors import ConfigError
from finetune_trainer.model import cpu_varlen
from finetune_trainer.model.attention import dynamic_dimensions
from finetune_trainer.model.compiler import compile_backward_at_once, reason_of
from finetune_trainer.model.layers import decoder_layers

# Maximum number of graphs of a layer's code, which all layers share. Graphs differ for two kinds of
# layers, for the first layer (its input has no gradient), without gradients, and for lengths in
# evaluation. Torch's own limit is 8.
_MOST_GRAPHS = 64


def compile_layers(
    base: Any,
    device: torch.device,
    *,
    is_asked: bool,
    warn: Callable[[str], None],
    backend: str | Callable[..., Any] = "inductor",
) -> None:
    """Set up the decoder layers of a transformers model to be compiled on their first call.

    Raises:
        ConfigError: the layers cannot be compiled and `is_asked`: a manifest requests it.
    """
    layers = decoder_layers(base)
    fault = _fault(base, layers, device, backend)
    if fault is not None:
        if is_asked:
            raise ConfigError(f"spec.training.compile: {fault}; set it to false")
        warn(_without(fault))
        return
    if device.type == "cpu":
        cpu_varlen.register()
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, _MOST_GRAPHS)
    # Torch would split a graph at DDP's buckets, of 1 and 25 MiB, to overlap all-reduces with the
    # rest of the graph. The gradients of a layer overlap with the previous layer anyway.
    torch._dynamo.config.optimize_ddp = False
    compile_backward_at_once()
    name, shapes = type(base).__name__, _Shapes()
    report = _breaks_reported(name, warn)
    for layer in layers:
        layer.compile(backend=backend)
    for layer in layers:
        _guard(layer, layers, name, shapes, report, is_asked=is_asked, warn=warn)


def _fault(
    base: Any, layers: list[nn.Module], device: torch.device, backend: str | Callable[..., Any]
) -> str | None:
    """Return why the layers cannot be compiled, as far as known before the first call."""
    if not layers:
        return f"the decoder layers of {type(base).__name__} cannot be found"
    if backend != "inductor":
        return None
    if device.type == "cpu" and not shutil.which("g++"):
        return "it needs g++ on a CPU, which is not installed"
    if device.type == "cuda" and find_spec("triton") is None:
        return "it needs the package triton on a GPU, which is not installed"
    return None


class _Shapes:
    """Marks sizes as dynamic or static, so the compiler need not recompile to find out."""

    def __init__(self) -> None:
        self._trained: set[torch.Size] = set()  # sizes of hidden states in training

    def mark(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Mark the arguments of a layer; the first one is its hidden states.

        The bounds of documents change with every pack. All other tensors have one size in training,
        if packs are padded, and are marked as static: the other sizes of evaluation would otherwise
        turn the kernels of training into kernels for any size. If rows are not padded, only the
        bounds are marked.
        """
        if torch.is_grad_enabled() and args:
            self._trained.add(args[0].shape)
        is_one_size = torch.is_grad_enabled() and len(self._trained) == 1
        for tensor in _tensors((args, kwargs)):
            if dimensions := dynamic_dimensions(tensor):
                for dimension in dimensions:
                    torch._dynamo.mark_dynamic(tensor, dimension)
            elif is_one_size:
                torch._dynamo.mark_static(tensor)


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, (tuple, list)):
        for one in given:
            yield from _tensors(one)
    elif isinstance(given, dict):
        yield from _tensors(list(given.values()))


def _guard(
    layer: nn.Module,
    layers: list[nn.Module],
    name: str,
    shapes: "_Shapes",
    report: Callable[[], None],
    *,
    is_asked: bool,
    warn: Callable[[str], None],
) -> None:
    """Run all layers uncompiled once the compiler refuses the graph of `layer`."""
    from torch._dynamo.exc import TorchDynamoException

    compiled = layer._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        shapes.mark(args, kwargs)
        try:
            result = compiled(*args, **kwargs)  # type: ignore[misc]  # `compile` has set it
            report()
            return result
        except TorchDynamoException as error:
            fault = f"layers of {name} cannot be compiled ({reason_of(error)})"
            if is_asked:
                raise ConfigError(f"spec.training.compile: {fault}; set it to false") from error
            for other in layers:
                other._compiled_call_impl = None
            warn(_without(fault))
            return layer._call_impl(*args, **kwargs)

    layer._compiled_call_impl = call


def _breaks_reported(name: str, warn: Callable[[str], None]) -> Callable[[], None]:
    """Return a function that warns once if a layer is compiled in more than one graph."""
    from torch._dynamo.utils import counters

    known: set[str] | None = set(counters["graph_break"])

    def report() -> None:
        nonlocal known
        if known is not None and (new := counters["graph_break"].keys() - known):
            known = None
            reason = min(new).partition("\n")[0]
            warn(f"layers of {name} do not compile in one graph, so steps take longer: {reason}")

    return report


def _without(fault: str) -> str:
    return f"training continues without compiled layers: {fault}"
