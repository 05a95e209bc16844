"""Choose the dtype of an exported model, and copy a model into it.

`output` calls it on rank 0. A model that is trained in fp32 is exported in the dtype of its base if
that dtype can hold the update. At learning rates below about 1e-5 bf16 rounds much of it away.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune_trainer.config import TrainConfig
from finetune_trainer.errors import ExportError
from finetune_trainer.model.identity import weight_files
from finetune_trainer.model.quantize import full_weight

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

LEAST_RETAINED = 0.95
"""Share of the update that must survive the rounding to the dtype of the base."""
_STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def choose_dtype(
    model: "PreTrainedModel", config: TrainConfig, warn: Callable[[str], None]
) -> torch.dtype:
    """Return the dtype in which a fully trained model is exported.

    Args:
        model: Trained model on any device.
        config: Configuration of the run. If it has no `output.dtype`, the model is compared with
            the files of its base.
        warn: Called if the model stays in fp32 because the update does not survive the rounding.
    """
    if config.output.dtype is not None:
        chosen: torch.dtype = getattr(torch, config.output.dtype)
        return chosen
    from safetensors import SafetensorError

    trained: torch.dtype = model.dtype
    if trained != torch.float32:
        return trained
    prefix = model.base_model_prefix
    try:
        with _stored_tensors(weight_files(config.model)) as stored:
            dtype = _dtype_of_most(stored)
            if dtype not in (torch.bfloat16, torch.float16):
                return torch.float32
            retained = retained_update(_named_as_saved(model), stored, prefix, dtype)
    except (OSError, SafetensorError) as error:
        warn(f"spec.output.dtype auto exports float32: the base model cannot be read ({error})")
        return torch.float32
    if retained >= LEAST_RETAINED:
        return dtype
    warn(
        f"spec.output.dtype auto exports float32: {dtype}, the dtype of the base model, would keep "
        f"{max(0.0, retained):.0%} of the update; set spec.output.dtype for smaller files"
    )
    return torch.float32


def retained_update(
    trained: Mapping[str, "Tensor"], stored: Mapping[str, Any], prefix: str, dtype: torch.dtype
) -> float:
    """Return the share of the update that survives the rounding of the weights to `dtype`.

    This is the projection of the rounded update on the exact one,
    sum((rounded - base)(exact - base)) / sum((exact - base)^2), read one tensor at a time. Rows
    that the base does not have are left out.

    Args:
        trained: fp32 weights by the names in which the model is saved.
        stored: Slices of the base's files by name, as safetensors returns them.
        prefix: Prefix of the model's names that the files of some bases lack, or have in addition.
        dtype: Dtype to round to.

    Returns:
        1.0 without any update; 0.0 if a weight overflows or the base lacks it.
    """
    product = square = 0.0
    for name, weight in trained.items():
        names = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
        part = next((stored[one] for one in names if one in stored), None)
        if part is None or weight.ndim != len(part.get_shape()):
            return 0.0
        base = part[:].float()
        exact = weight.detach()[: base.shape[0]].cpu() if base.ndim else weight.detach().cpu()
        if exact.shape != base.shape:
            return 0.0
        rounded = exact.to(dtype).float()
        if not bool(rounded.isfinite().all()):
            return 0.0
        exact = exact.sub(base)
        product += float(rounded.sub_(base).mul_(exact).sum(dtype=torch.float64))
        square += float(exact.square_().sum(dtype=torch.float64))
    return product / square if square else 1.0


def copy_weights(into: "nn.Module", model: "nn.Module") -> None:
    """Copy all parameters and buffers of `model`, dequantised, in the dtypes of `into`.

    Raises:
        ExportError: a finite weight exceeds the range of the dtype.
    """
    for name, tensor in chain(into.named_parameters(), into.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        with torch.no_grad():
            tensor.copy_(full_weight(model.get_submodule(owner), leaf))
        refuse_overflow(name, tensor)


def refuse_overflow(name: str, tensor: "Tensor") -> None:
    """Refuse a weight that is infinite in fp16, whose largest number is 65,504."""
    if tensor.dtype == torch.float16 and bool(tensor.isinf().any()):
        raise ExportError(
            f"spec.output.dtype float16 cannot hold {name}, which exceeds 65,504, so the model is "
            "not exported; use bfloat16 or float32"
        )


@contextmanager
def _stored_tensors(files: list[Path]) -> Iterator[dict[str, Any]]:
    """Open the files of a base model; a slice is read when it is indexed."""
    from safetensors import safe_open

    with ExitStack() as opened:
        found: dict[str, Any] = {}
        for path in files:
            file = opened.enter_context(safe_open(path, framework="pt"))
            found |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        yield found


def _dtype_of_most(stored: Mapping[str, Any]) -> torch.dtype | None:
    """Return the floating dtype of most bytes; None if another dtype has more."""
    sizes: Counter[str] = Counter()
    for part in stored.values():
        dtype = part.get_dtype()
        width = _STORED[dtype].itemsize if dtype in _STORED else 1
        sizes[dtype] += width * torch.Size(part.get_shape()).numel()
    return _STORED.get(sizes.most_common(1)[0][0]) if sizes else None


def _named_as_saved(model: "PreTrainedModel") -> dict[str, "Tensor"]:
    """Return the weights as `save_pretrained` names and divides them, without tied copies."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    state = remove_tied_weights_from_state_dict(model.state_dict(), model)
    names = {name for name, _ in model.named_parameters()}
    converted: dict[str, Tensor] = revert_weight_conversion(
        model, {name: tensor for name, tensor in state.items() if name in names}
    )
    return converted
