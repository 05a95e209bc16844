"""Choose the attention kernel: `spec.training.attention`.

Called by `prepare`. `varlen` (`attention`) is the fastest and supports most models on a GPU of 2020
or later, and on a CPU. `flex` supports models that it does not. `model` is the model's own, with a
mask quadratic in the length of a pack. A requested kernel that cannot be used is refused; a default
that the GPU does not support gives one warning.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from finetune_trainer.errors import ConfigError
from finetune_trainer.model import attention, flex
from finetune_trainer.sizing.kernels import Kernel, gpu_fault

_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_NARROWEST_FLEX = 16  # head width that Triton multiplies (torch 2.13, inductor/kernel/flex)


@dataclass(frozen=True)
class Card:
    """Capabilities of a GPU and its software.

    Attributes:
        capability: NVIDIA's compute capability: (9, 0) is Hopper.
        has_triton: Whether Triton is installed.
    """

    capability: tuple[int, int]
    has_triton: bool

    @classmethod
    def of(cls, device: torch.device) -> "Card | None":
        """Return the card of a device; None for a CPU."""
        if device.type != "cuda":
            return None
        has_triton = find_spec("triton") is not None
        return cls(torch.cuda.get_device_capability(device), has_triton)


def choose_attention(
    base: Any,
    card: Card | None,
    dtype: torch.dtype,
    *,
    asked: str = "fastest",
    compiles: bool = False,
    warn: Callable[[str], None],
) -> Kernel:
    """Set the requested attention of a transformers model, or the fastest that supports it.

    Args:
        base: The model; `model` leaves it unchanged.
        card: GPU that trains it; None for a CPU.
        dtype: Dtype of queries, keys and values.
        asked: `fastest`, or the name of a kernel.
        compiles: Whether the layers will be compiled.
        warn: Gets a message if the GPU cannot run the kernel that would be the default.

    Raises:
        ConfigError: the requested kernel does not support this model or this GPU.
    """
    precision = _PRECISIONS.get(dtype, "fp32")
    of_card = None if card is None else gpu_fault(Kernel.VARLEN, precision, card.capability)
    faults = {
        Kernel.VARLEN: of_card or attention.fault(base, on_gpu=card is not None, compiles=compiles),
        Kernel.FLEX: _flex_card_fault(precision, card) or flex_fault(base),
        Kernel.MODEL: None,
    }
    name = type(base).__name__
    if asked != "fastest":
        kernel = Kernel(asked)
        if faults[kernel] is not None:
            raise ConfigError(
                f"spec.training.attention {asked} does not support {name}: {faults[kernel]}; use "
                "fastest"
            )
    else:
        kernel = next(one for one in Kernel if faults[one] is None)
        if card and (kernel is Kernel.MODEL or (of_card and kernel is Kernel.FLEX)):
            reasons = "; ".join(f"{one}: {why}" for one, why in faults.items() if why)
            warn(f"attention of {name} is computed by {_SPELLED[kernel]} ({reasons})")
    if kernel is Kernel.VARLEN:
        attention.use_documents(base)
        if card is not None:
            use_newest_flash(card, warn)
    elif kernel is Kernel.FLEX:
        use_flex(base)
    return kernel


_SPELLED = {
    Kernel.VARLEN: "flash attention",
    Kernel.FLEX: "flex attention",
    Kernel.MODEL: "the model's own code, with a mask quadratic in the length of a pack",
}


def flex_fault(base: Any) -> str | None:
    """Return why flex attention does not support a model on any GPU, if it does not."""
    config = base.config.get_text_config()
    if (width := min(attention.head_widths(base), default=_NARROWEST_FLEX)) < _NARROWEST_FLEX:
        return f"its heads are {width} wide, flex attention's at least {_NARROWEST_FLEX}"
    if not (base._supports_flex_attn and base._can_set_attn_implementation()):
        return "transformers does not offer it for this family"
    return attention.shape_fault(base) or attention.dropout_fault(config)


def use_flex(base: Any) -> None:
    """Register flex attention with documents, and select it."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionInterface.register(flex.NAME, flex.attend)
    AttentionMaskInterface.register(flex.NAME, eager_mask)  # for generation
    base.set_attn_implementation(flex.NAME)


def use_newest_flash(card: Card, warn: Callable[[str], None]) -> str | None:
    """Activate FlashAttention 3 or 4 if its package is installed and the GPU supports it.

    Returns:
        The active version; None for torch's own, FlashAttention 2.
    """
    from torch.nn.attention import activate_flash_attention_impl

    for version in {9: ("FA3", "FA4"), 10: ("FA4",)}.get(card.capability[0], ()):
        try:
            activate_flash_attention_impl(version)
        except ModuleNotFoundError:
            continue  # not installed, which is the usual case
        except (ImportError, RuntimeError, OSError) as error:
            warn(f"{version} is installed but cannot be used; using FlashAttention 2: {error}")
            continue
        return version
    return None


def _flex_card_fault(precision: str, card: Card | None) -> str | None:
    if card is None:
        return "torch has no gradients for it on a CPU"
    return gpu_fault(Kernel.FLEX, precision, card.capability) or (
        None if card.has_triton else "it needs the package triton, which is not installed"
    )
