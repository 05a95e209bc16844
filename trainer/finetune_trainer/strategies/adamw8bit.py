"""AdamW (arXiv:1711.05101) for bf16 parameters with 8-bit moments: 4 bytes per parameter.

Called by `optimizer`, for full fine-tuning. A pass reads gradients, parameters and moments of a few
million elements, computes in fp32 and writes them back, so a full fp32 copy never exists. If a
gradient is not finite, the step writes the old values back, without a host sync.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import tensor as dtensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from finetune_trainer.model.compiler import reason_of
from finetune_trainer.sizing.peak import ELEMENTS_PER_PASS
from finetune_trainer.strategies.blockwise import Codebook, block_length, decode, encode
from finetune_trainer.strategies.rounding import key_of, rounded

BETAS = (0.9, 0.999)
EPSILON = 1e-8
# On a CPU the buffers of a pass stay in its cache.
_ELEMENTS_PER_PASS_ON_CPU = 2**18


class Scalars(NamedTuple):
    """Values of one step for all elements of a parameter; scalars on its device."""

    step: Tensor  # updates before this one, fp32
    is_finite: Tensor  # bool; False skips the update
    factor: Tensor  # of the gradients: clipping
    learning_rate: Tensor
    decay: Tensor  # learning rate x weight decay
    key: Tensor  # of the rounding, int32


class Moment(NamedTuple):
    """A moment: codes (N, B) and scales (N,), or fp32 values (N, 1)."""

    values: Tensor
    scales: Tensor | None
    codebook: Codebook  # of the codes


class AdamW8bit:
    """Optimizer of parameters that are plain tensors or `DTensor`s sharded by the first dimension.

    `state` has `step` and both moments of each parameter: `exp_avg.codes`, shaped like the
    parameter, and `exp_avg.scales` (first dimension, blocks), or an fp32 `exp_avg` if 8 bits would
    save no memory (vectors).
    """

    def __init__(
        self,
        decays: Mapping[nn.Parameter, float],
        names: Mapping[nn.Parameter, str],
        *,
        seed: int,
        compiled: bool,
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        """Create the state.

        Args:
            decays: Trained parameters and their weight decay.
            names: Names of the parameters, the same in every attempt.
            seed: Seed of the stochastic rounding.
            compiled: Whether the pass is compiled into one kernel on a GPU; otherwise every
                operation reads and writes the GPU's memory.
            warn: Receives one message if compilation fails.
        """
        self._decays = decays
        self._keys = {parameter: key_of(seed, name) for parameter, name in names.items()}
        has_compiler = find_spec("triton") is not None
        is_on_gpu = all(parameter.is_cuda for parameter in decays)
        self._update = compiled_update(warn) if compiled and has_compiler and is_on_gpu else update
        self.state = {parameter: _fresh_state(parameter) for parameter in decays}
        self._codes = {
            device: (Codebook.on(device, signed=True), Codebook.on(device, signed=False))
            for device in {parameter.device for parameter in decays}
        }

    @torch.no_grad()
    def step(self, learning_rate: float, factor: Tensor, is_finite: Tensor) -> None:
        """Update with the gradients times `factor`, or skip the update if `is_finite` is False.

        No host sync if parameters and both scalars are on the same device.
        """
        # A host sync if parameters are offloaded. The rate is filled in on its device, because a
        # copy from the host would be a sync, too.
        shared = {
            device: (is_finite.to(device), factor.to(device), _filled(learning_rate, device))
            for device in self._codes
        }
        for parameter, decay in self._decays.items():
            if parameter.grad is None:
                continue
            state, device = self.state[parameter], parameter.device
            finite, clip, rate = shared[device]
            scalars = Scalars(
                step=state["step"],
                is_finite=finite,
                factor=clip,
                learning_rate=rate,
                decay=_filled(learning_rate * decay, device),
                key=_filled(self._keys[parameter], device, torch.int32),
            )
            for piece in _pieces(parameter, state, self._codes[device]):
                self._update(*piece, scalars)
            state["step"] += scalars.is_finite


def update(
    weights: Tensor,
    grads: Tensor,
    first: Moment,
    second: Moment,
    rows: Tensor,
    scalars: Scalars,
) -> None:
    """Update a piece of one parameter in place.

    Args:
        weights: (N, B), bf16.
        grads: (N, B), bf16.
        first: Mean of the gradients.
        second: Mean of their squares.
        rows: (N,), int32: indices of the rows within the whole parameter.
        scalars: Values of this step.
    """
    beta1, beta2 = BETAS
    count = scalars.step + 1
    grad = grads.float() * scalars.factor
    mean = _read(first).lerp(grad, 1 - beta1)
    square = _read(second).lerp(grad.square(), 1 - beta2)
    spread = (square / (1 - beta2**count)).sqrt() + EPSILON
    new = weights.float() * (1 - scalars.decay)
    new = new - scalars.learning_rate * (mean / (1 - beta1**count)) / spread
    _write(first, mean, scalars.is_finite)
    _write(second, square, scalars.is_finite)
    # The key counts completed updates, so that a resumed run rounds alike and a skipped step has no
    # effect.
    key = scalars.key ^ scalars.step.to(torch.int32)
    weights.copy_(torch.where(scalars.is_finite, rounded(new, key, rows), weights))


def compiled_update(
    warn: Callable[[str], None], backend: str | Callable[..., Any] = "inductor"
) -> Callable[..., None]:
    """Return `update` as one kernel, which falls back to eager mode if compilation fails."""
    from torch._dynamo.exc import TorchDynamoException

    compiled: Callable[..., None] | None = torch.compile(update, backend=backend)

    def run(
        weights: Tensor,
        grads: Tensor,
        first: Moment,
        second: Moment,
        rows: Tensor,
        scalars: Scalars,
    ) -> None:
        nonlocal compiled
        piece = (weights, grads, first, second, rows)
        if compiled is not None:
            try:
                compiled(*_with_dynamic_length(piece), scalars)
            except TorchDynamoException as error:  # before anything has run
                compiled = None
                warn(f"spec.training.optimizer adamw8bit is not compiled: {reason_of(error)}")
            else:
                return
        update(*piece, scalars)

    return run


def _read(moment: Moment) -> Tensor:
    values, scales, codebook = moment
    return values if scales is None else decode(values, scales, codebook)


def _write(moment: Moment, new: Tensor, is_finite: Tensor) -> None:
    values, scales, codebook = moment
    if scales is not None:
        new, new_scales = encode(new, codebook)
        scales.copy_(torch.where(is_finite, new_scales, scales))
    values.copy_(torch.where(is_finite, new, values))


Piece = tuple[Tensor, Tensor, Moment, Moment, Tensor]


def _pieces(
    parameter: nn.Parameter, state: Mapping[str, Tensor], codes: tuple[Codebook, Codebook]
) -> Iterator[Piece]:
    """Yield this rank's part of a parameter as views of its blocks, in pieces of limited size."""
    assert parameter.grad is not None, "callers skip parameters without a gradient"
    length = block_length(parameter.shape)
    width = length or 1
    weights = _local(parameter.detach()).view(-1, width)
    grads = _local(parameter.grad).reshape(-1, width)
    whole = [
        _moment(state, name, width, codebook)
        for name, codebook in zip(("exp_avg", "exp_avg_sq"), codes, strict=True)
    ]
    start, device = _first_index(parameter) // width, weights.device
    per_pass = (ELEMENTS_PER_PASS if weights.is_cuda else _ELEMENTS_PER_PASS_ON_CPU) // width
    for low in range(0, len(weights), per_pass):
        part = slice(low, min(low + per_pass, len(weights)))
        rows = torch.arange(start + low, start + part.stop, dtype=torch.int32, device=device)
        first, second = (
            Moment(values[part], None if scales is None else scales[part], codebook)
            for values, scales, codebook in whole
        )
        yield weights[part], grads[part], first, second, rows


def _moment(state: Mapping[str, Tensor], name: str, width: int, codebook: Codebook) -> Moment:
    if name in state:
        return Moment(_local(state[name]).view(-1, width), None, codebook)
    codes, scales = (_local(state[f"{name}.{part}"]) for part in ("codes", "scales"))
    return Moment(codes.view(-1, width), scales.view(-1), codebook)


def _with_dynamic_length(piece: Piece) -> Piece:
    """Mark the lengths as dynamic, so that one kernel serves pieces of all lengths."""
    weights, grads, first, second, rows = piece
    for tensor in (weights, grads, *first[:2], *second[:2], rows):
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return piece


def _filled(value: float, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


def _first_index(parameter: Tensor) -> int:
    """Return the index within the whole parameter of the first element of this rank's part."""
    if not isinstance(parameter, DTensor):
        return 0
    _, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return int(offsets[0]) * parameter.shape[1:].numel()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _fresh_state(parameter: nn.Parameter) -> dict[str, Tensor]:
    state = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
    length = block_length(parameter.shape)
    for name in ("exp_avg", "exp_avg_sq"):
        if length is None:
            state[name] = torch.zeros_like(parameter, dtype=torch.float32)
            continue
        code_of_zero = 127 if name == "exp_avg" else 0
        state[f"{name}.codes"] = torch.full_like(parameter, code_of_zero, dtype=torch.uint8)
        blocks = (parameter.shape[0], parameter.shape[1:].numel() // length)
        state[f"{name}.scales"] = _zeros_sharded_like(parameter, blocks)
    return state


def _zeros_sharded_like(parameter: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return fp32 zeros whose first dimension is sharded like the parameter's."""
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, device=parameter.device)
    zeros: Tensor = dtensor.zeros(
        shape, device_mesh=parameter.device_mesh, placements=parameter.placements
    )
    return zeros.to(parameter.device)  # the host if parameters are offloaded
