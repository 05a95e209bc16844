"""A device that computes nothing: whatever the host would have to wait for raises.

Its tensors are fake ones on `cpu`, as the CPU wheel has no fake `cuda` ones. They have shapes and
no values, so `item`, `bool`, `tolist`, `nonzero` and an index by a mask raise. A move to the host
would be silent, as both are `cpu`: it is seen at its call where it names the host (`.cpu()`,
`.numpy()`, `.to("cpu")`); one to another tensor's device is none.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

DEVICE = torch.device("cpu")


class MovedToHostError(Exception):
    """A tensor of the device was moved to the host, which waits for it."""


class _Moves(TorchFunctionMode):
    """Raise at each call that moves a tensor of the device to the host."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        name = getattr(function, "__name__", "")
        if args and isinstance(args[0], FakeTensor):
            first, named = args[1] if len(args) > 1 else None, given.get("device")
            is_host = [isinstance(target, str) and target == "cpu" for target in (first, named)]
            names_host = name == "to" and any(is_host)
            if name in ("cpu", "numpy") or names_host:
                raise MovedToHostError(name)
        return function(*args, **given)


class FakeDevice:
    """Puts models and inputs onto the device, and says where work of the host goes on."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let everything in the block be computed on the device."""
        with self._mode, _Moves():
            yield

    def put(self, model: nn.Module) -> None:
        """Move parameters and buffers of a model."""
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    fake = self._mode.from_tensor(parameter.detach())
                    module._parameters[name] = nn.Parameter(fake, parameter.requires_grad)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self._mode.from_tensor(buffer)

    def fed_by(self, inputs: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
        """Return a function of the host whose results are moved to the device."""

        def moved(*args: Any) -> dict[str, Tensor]:
            made = on_host(inputs)(*args)
            return {name: self._mode.from_tensor(tensor) for name, tensor in made.items()}

        return moved


def on_host(work: Callable[..., Any]) -> Callable[..., Any]:
    """Return `work` as it is done on the host, where the device is not waited for."""

    def done(*args: Any, **options: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            made = work(*args, **options)
            return iter(list(made)) if isinstance(made, Iterator) else made

    return done
