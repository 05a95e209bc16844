"""Fuse head and cross-entropy, so the logits of all positions never exist at the same time.

Called by `loss`. The function runs in the head's own `forward`, where FSDP2 and ZeRO-3 gather its
weight and reduce its gradient. Anywhere else the gradients would silently be wrong.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

# Bytes of the logits of one chunk; other temporary tensors take at most the same. A chunk has 1,046
# rows of 128,256 logits, because products of few rows would not occupy a GPU.
_CHUNK_BYTES = 2**29
_CHUNK_BYTES_ON_CPU = 2**25
_OTHER_BYTES_PER_ROW = 64  # target, maximum, sum and loss of a row


@dataclass(frozen=True)
class OutputForm:
    """Transformation of the head's output x by the model: cap * tanh(scale * x / cap).

    Attributes:
        scale: Factor on the head's output.
        cap: Bound of the logits; 0 for none.
        place: Object and attribute that hold the parameter, and its neutral value.
    """

    scale: float = 1.0
    cap: float = 0.0
    place: tuple[Any, str, float | None] | None = None

    def to_logits_(self, head_output: Tensor) -> Tensor:
        """Return the logits in at least fp32; overwrites a head output of that dtype."""
        logits = head_output.to(torch.promote_types(head_output.dtype, torch.float32))
        if self.scale != 1:
            logits.mul_(self.scale)
        if self.cap:
            logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits

    def to_output_gradient_(self, gradient: Tensor, logits: Tensor | None) -> Tensor:
        """Convert the gradient by the logits to the gradient by the head's output, in place.

        Capped logits are needed, d tanh(x) / dx = 1 - tanh(x)^2, and overwritten.
        """
        if logits is not None:
            gradient.mul_(logits.div_(self.cap).square_().neg_().add_(1))
        if self.scale != 1:
            gradient.mul_(self.scale)
        return gradient

    @contextmanager
    def left_to_head(self) -> Iterator[None]:
        """Neutralise the transformation in the model, because the fused head applies it."""
        if self.place is None:
            yield
            return
        owner, name, neutral = self.place
        value = getattr(owner, name)
        setattr(owner, name, neutral)
        try:
            yield
        finally:
            setattr(owner, name, value)


class FusedHead(nn.Linear):
    """A language model's head that can return the loss in place of logits."""

    def __init__(self, head: nn.Linear, form: OutputForm) -> None:
        has_bias = head.bias is not None
        super().__init__(head.in_features, head.out_features, bias=has_bias, device="meta")
        self.weight, self.bias = head.weight, head.bias
        self._form = form
        self._targets: Tensor | None = None

    @contextmanager
    def summing(self, targets: Tensor) -> Iterator[None]:
        """Let `forward` return the summed loss (1, 1, 1) of hidden (1, K, D) for `targets` (K,)."""
        self._targets = targets
        try:
            with self._form.left_to_head():
                yield
        finally:
            self._targets = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V), or the loss within `summing`."""
        if self._targets is None:
            return super().forward(hidden)
        loss = linear_cross_entropy(
            hidden[0], self.weight, self.bias, self._targets, form=self._form
        )
        return loss.view(1, 1, 1).clone()  # FSDP's backward hook must not be on a view


def fuse_head(base: Any) -> FusedHead | None:
    """Insert a fused head into a transformers model; None if the loss would not be the same.

    It is not the same for a head that is not a plain linear layer (adapters, quantised weights) and
    for a model with an unknown transformation of the head's output.
    """
    head = base.get_output_embeddings()
    # A nested head would be shared with the copy that gets the stand-ins.
    is_plain = type(head) is nn.Linear and any(head is child for child in base.children())
    form = _output_form(base, head.out_features) if is_plain else None
    if form is None:
        return None
    fused = FusedHead(head, form)
    base.set_output_embeddings(fused)
    return fused


def linear_cross_entropy(
    hidden: Tensor,  # (K, D)
    weight: Tensor,  # (V, D)
    bias: Tensor | None,  # (V,)
    targets: Tensor,  # (K,) int64
    *,
    form: OutputForm = OutputForm(),
    chunk_bytes: int | None = None,
) -> Tensor:
    """Return the summed cross-entropy, a scalar in fp32 (fp64 for fp64).

    Gradients are computed in the forward pass, because the logits exist only there. In addition to
    the gradients and the autocast copy of the weight, at most 2 `chunk_bytes` are alive at any time
    (two rows of logits, if that is more).
    """
    usual = _CHUNK_BYTES_ON_CPU if hidden.device.type == "cpu" else _CHUNK_BYTES
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, form, chunk_bytes or usual, torch.is_grad_enabled()
    )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        form: OutputForm,
        chunk_bytes: int,
        with_gradients: bool,
    ) -> Tensor:
        device = hidden.device.type
        is_autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_autocast else weight.dtype
        accumulate_dtype = torch.promote_types(dtype, torch.float32)
        weight_cast = weight.to(dtype)
        bias_cast = None if bias is None else bias.to(dtype)
        loss = torch.zeros((), dtype=accumulate_dtype, device=hidden.device)
        sources = (hidden, weight, bias)
        grads = [
            torch.zeros_like(source, dtype=accumulate_dtype)
            if with_gradients and needed and source is not None
            else None
            for source, needed in zip(sources, ctx.needs_input_grad, strict=False)
        ]
        grad_hidden, grad_weight, grad_bias = grads
        row_bytes = len(weight) * accumulate_dtype.itemsize + weight.shape[1] * dtype.itemsize
        rows = max(1, chunk_bytes // (row_bytes + _OTHER_BYTES_PER_ROW))
        for start in range(0, len(targets), rows):
            part = slice(start, start + rows)
            inputs, wanted = hidden[part].to(dtype), targets[part, None]
            part_loss, gradient = _loss_and_gradient(
                inputs, weight_cast, bias_cast, wanted, form, with_gradients
            )
            loss += part_loss
            if gradient is None:
                continue
            if grad_hidden is not None:
                grad_hidden[part] = gradient @ weight_cast
            if grad_weight is not None:
                _add_product(grad_weight, gradient, inputs, chunk_bytes)
            if grad_bias is not None:
                grad_bias += gradient.sum(0)
            del gradient
        del grad_hidden, grad_weight, grad_bias
        ctx.grads = []
        for source in sources:  # frees each sum as soon as its gradient exists
            grad = grads.pop(0)
            ctx.grads.append(None if grad is None or source is None else grad.to(source.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, ()  # a second backward would scale them again
        return (*(None if g is None else g.mul_(grad.to(g.dtype)) for g in grads), *[None] * 4)


def _loss_and_gradient(
    inputs: Tensor,  # (R, D)
    weight: Tensor,  # (V, D)
    bias: Tensor | None,  # (V,)
    wanted: Tensor,  # (R, 1) int64
    form: OutputForm,
    with_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the summed loss of a chunk, and its gradient by the head's output.

    At most two tensors of (R, V) are alive at a time, hence the explicit `del` statements.
    """
    logits = form.to_logits_(functional.linear(inputs, weight, bias))
    log_probs = logits.log_softmax(-1)
    loss = -log_probs.gather(1, wanted).sum()
    if not with_gradient:
        return loss, None
    capped = logits if form.cap else None
    del logits
    # d loss / d logits = softmax(logits) - onehot(target)
    minus_one = -torch.ones_like(wanted, dtype=log_probs.dtype)
    gradient = log_probs.exp_().scatter_add_(1, wanted, minus_one)
    form.to_output_gradient_(gradient, capped)
    del capped
    return loss, gradient.to(inputs.dtype)


def _add_product(
    total: Tensor,  # (V, D)
    gradient: Tensor,  # (R, V)
    inputs: Tensor,  # (R, D)
    max_bytes: int,
) -> None:
    """Add gradient.T @ inputs to `total`, whose dtype may be larger, within `max_bytes`."""
    if total.dtype == inputs.dtype:
        total.addmm_(gradient.T, inputs)
        return
    rows = max(1, max_bytes // (inputs.shape[1] * inputs.dtype.itemsize))
    for start in range(0, len(total), rows):
        part = slice(start, start + rows)
        total[part] += gradient[:, part].T @ inputs


def _output_form(base: Any, vocabulary: int) -> OutputForm | None:
    """Return the transformation of the head's output, verified by the model's own forward."""
    form = _declared_form(base)
    values = torch.linspace(-40, 40, vocabulary)[None, None]
    try:
        given = _around(base, values)
        with form.left_to_head():
            alone = _around(base, values)
    except Exception:  # the stand-ins do not fit this forward: unknown transformation
        return None
    is_known = given.shape == values.shape and torch.allclose(
        given, form.to_logits_(values.clone())
    )
    return form if is_known and torch.equal(alone, values) else None


def _declared_form(base: Any) -> OutputForm:
    text = base.config.get_text_config()
    if cap := getattr(text, "final_logit_softcapping", None):
        return OutputForm(cap=cap, place=(text, "final_logit_softcapping", None))
    if divisor := getattr(text, "logits_scaling", None):
        return OutputForm(scale=1 / divisor, place=(text, "logits_scaling", 1.0))
    if factor := getattr(base, "logit_scale", None):
        return OutputForm(scale=factor, place=(base, "logit_scale", 1.0))
    return OutputForm()


def _around(base: Any, head_output: Tensor) -> Tensor:
    """Return the logits of a copy of the model whose body and head are stand-ins."""
    shell = copy.copy(base)
    shell._modules = dict(base._modules)
    shell._modules[base.base_model_prefix] = _StandIn(_BodyOutput([torch.zeros(1, 1, 1)]))
    shell.set_output_embeddings(_StandIn(head_output))
    logits: Tensor = shell(input_ids=torch.zeros(1, 1, dtype=torch.long)).logits
    return logits


class _BodyOutput(tuple[Tensor]):
    """Hidden states under either name, and None for all other attributes."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


class _StandIn(nn.Module):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output
