"""Read the shape of a pretrained model, which is built on the meta device.

The only place that reads a model for the memory formula.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from finetune_trainer.config import LoraSettings, MethodConfig, TrainConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.refusals import SILENT
from finetune_trainer.sizing.base_shape import BaseShape, BaseTensor, LayerKind, Role
from finetune_trainer.sizing.kernels import Kernel

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

# Names of the modules that end attention or an MLP, in transformers.
_LAST = frozenset(
    (
        *("o_proj", "out_proj", "dense", "c_proj", "wo", "linear_out", "output_linear"),
        *("down_proj", "proj_down", "fc2", "fc_out", "dense_4h_to_h", "w2"),
    )
)
# Modules of linear layers whose activations are unknown.
_UNKNOWN = ("indexer", "compressor", "adapter_list", "mamba", "linear_attn", "temporal_block")
_INTO_EXPERTS = ("gate", "up", "input", "w1", "w3", "v1")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")
_HEAD_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")


def read_base_of(config: TrainConfig) -> BaseShape:
    """Build the model of a configuration without weights, and read its shape."""
    import torch

    from finetune_trainer.model.load import load_model

    # A 16-bit model shows which tensors are in fp32 in any precision.
    method = MethodConfig(type="lora", lora=LoraSettings())
    training = config.training.model_copy(update={"precision": "bf16", "optimizer": "adamw"})
    plain = config.model_copy(update={"method": method, "training": training})
    return read_base(load_model(plain, torch.device("meta"), SILENT))


def read_base(model: "PreTrainedModel") -> BaseShape:
    """Read the shape of a transformers model on the meta device; adapters are attached to it."""
    from finetune_trainer.model.ends import untied_embedding_and_head
    from finetune_trainer.model.layers import decoder_layers

    layers = decoder_layers(model)
    places = {module: name for name, module in model.named_modules()}
    prefixes = [f"{places[layer]}." for layer in layers]
    names = {parameter: name for name, parameter in model.named_parameters()}
    embedding, head = (
        () if part is None else tuple(names[p] for p in part.parameters())
        for part in untied_embedding_and_head(model, layers)
    )
    weight = getattr(model.get_output_embeddings(), "weight", None)
    config = model.config.get_text_config()
    hidden = int(config.hidden_size)
    norms = [_norms(layer, hidden) for layer in layers]
    is_tied = weight is not None and weight is model.get_input_embeddings().weight
    kernels = _fused_attention(model)
    classes = {type(module).__name__ for module in model.modules()}
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    inside, others = _read_tensors(model, prefixes)  # attaches adapters
    kinds = [
        LayerKind(tensors=tuple(tensors), **counts)
        for tensors, counts in zip(inside, norms, strict=True)
    ]
    different = tuple(dict.fromkeys(kinds))
    return BaseShape(
        family=str(model.config.model_type),
        kinds=different,
        order=tuple(different.index(kind) for kind in kinds),
        layers_name=prefixes[0].rsplit(".", 2)[0] if prefixes else "",
        others=tuple(others),
        embedding=embedding,
        head=head,
        head_weight=None if weight is None else names[weight],
        hidden=hidden,
        heads=int(getattr(config, "num_attention_heads", 0)),
        vocabulary=int(config.vocab_size if weight is None else weight.shape[0]),
        is_tied=is_tied,
        experts_per_token=max(_largest(getattr(config, one, 0)) for one in _EXPERTS_PER_TOKEN),
        activation=next((a for one in _ACTIVATIONS if (a := getattr(config, one, None))), ""),
        fused_attention=kernels,
        score_bytes=_score_bytes(model),
        scales_norms_in_fp32=any("Gemma" in one and "Norm" in one for one in classes),
        is_rotary=any("Rotary" in one for one in classes),
        buffer_bytes=buffers,
    )


def _fused_attention(model: "PreTrainedModel") -> tuple[str, ...]:
    """Return the names of our attention kernels that support the model on a GPU."""
    from finetune_trainer.model import attention
    from finetune_trainer.model.kernels import flex_fault

    faults = {
        Kernel.VARLEN: attention.fault(model, on_gpu=True, compiles=True),
        Kernel.FLEX: flex_fault(model),
    }
    return tuple(str(kernel) for kernel, fault in faults.items() if fault is None)


def _score_bytes(model: "PreTrainedModel") -> int:
    """Return the bytes per head and pair of tokens that the model's own attention retains.

    Without torch's fused attention these are scores and probabilities in 16 bits; with a cap of the
    scores also the results of tanh and softmax.
    """
    if model._supports_sdpa:
        return 0
    config = model.config.get_text_config()
    return 8 if getattr(config, "attn_logit_softcapping", None) else 4


def _read_tensors(
    model: "PreTrainedModel", prefixes: Sequence[str]
) -> tuple[list[list[BaseTensor]], list[BaseTensor]]:
    """Return the tensors of each layer and of the rest of the model."""
    from finetune_trainer.model.adapters import routers

    linear, router_names = _linear_weights(model), frozenset(routers(model))
    found = {
        name: (parameter, _values(name, parameter, linear, router_names))
        for name, parameter in model.named_parameters()
    }
    factors = _lora_factors(model)
    inside, others = [list[BaseTensor]() for _ in prefixes], list[BaseTensor]()
    layer_of = {prefix: index for index, prefix in enumerate(prefixes)}
    depth = prefixes[0].count(".") if prefixes else 0
    for name, (parameter, values) in found.items():
        prefix = ".".join(name.split(".")[:depth]) + "."
        factor = factors.get(parameter, 0)
        index = layer_of.get(prefix)
        own = name if index is None else name.removeprefix(prefix)
        tensor = BaseTensor(name=own, lora_factor=factor, **values)
        (others if index is None else inside[index]).append(tensor)
    return [_with_ends(tensors) for tensors in inside], others


def _values(
    name: str, parameter: Any, linear: Mapping[Any, bool], routers: frozenset[str]
) -> dict[str, Any]:
    import torch

    role = _role(name, parameter.ndim, parameter in linear, name.rsplit(".", 1)[0] in routers)
    return {
        "shape": tuple(parameter.shape),
        "role": role,
        "is_linear": parameter in linear,
        "is_transposed": linear.get(parameter, False),
        "is_fp32": parameter.dtype == torch.float32,
        "is_constant": not parameter.requires_grad,
    }


def _role(name: str, ndim: int, is_linear: bool, is_router: bool) -> Role:
    module, _, own = name.rpartition(".")
    last = module.rsplit(".", 1)[-1] if own == "weight" else own
    is_shared = "shared_expert" in name or "shared_mlp" in name
    if ndim < 2 or own.endswith("bias"):  # also the stacked biases of experts
        return Role.VECTOR
    if "expert" in name and ndim == 3 and not is_shared:
        is_first = last.startswith(_INTO_EXPERTS)
        return Role.INTO_EXPERTS if is_first else Role.OUT_OF_EXPERTS
    if is_router:
        return Role.ROUTER
    if not is_linear or any(part in name for part in _UNKNOWN):
        return Role.OTHER
    is_last = last in _LAST
    if is_shared:
        return Role.OUT_OF_SHARED_EXPERT if is_last else Role.INTO_SHARED_EXPERT
    if "attn" in module or "attention" in module:
        return Role.OUT_OF_ATTENTION if is_last else Role.INTO_ATTENTION
    return Role.OUT_OF_MLP if is_last else Role.INTO_MLP


def _with_ends(tensors: list[BaseTensor]) -> list[BaseTensor]:
    """Return the tensors of a layer, whose last product ends attention or MLP if none is named."""
    ends = (
        (Role.INTO_ATTENTION, Role.OUT_OF_ATTENTION),
        (Role.INTO_MLP, Role.OUT_OF_MLP),
    )
    for into, out in ends:
        products = [index for index, one in enumerate(tensors) if one.role is into]
        if len(products) > 1 and all(one.role is not out for one in tensors):
            last = products[-1]
            tensors[last] = tensors[last].model_copy(update={"role": out})
    return tensors


def _linear_weights(model: "nn.Module") -> dict[Any, bool]:
    """Return the weights of linear layers, and whether they are transposed."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    modules = [one for one in model.modules() if isinstance(one, nn.Linear | Conv1D)]
    return {one.weight: isinstance(one, Conv1D) for one in modules}


def _norms(layer: "nn.Module", hidden: int) -> dict[str, Any]:
    """Return the fields of a layer's kind that describe its norms."""
    count, others, has_head_norms = 0, list[int](), False
    for name, module in layer.named_modules():
        if "Norm" not in type(module).__name__ or list(module.children()):
            continue
        width = max((parameter.numel() for parameter in module.parameters()), default=hidden)
        if name.endswith(_HEAD_NORMS):
            has_head_norms = True
        elif width == hidden:
            count += 1
        else:
            others.append(width)
    return {"norms": count, "other_norms": tuple(others), "has_head_norms": has_head_norms}


def _largest(value: Any) -> int:
    """Return a number of a configuration; some families give one per layer."""
    return max(value) if isinstance(value, list | tuple) else int(value or 0)


def _lora_factors(model: "PreTrainedModel") -> dict[Any, int]:
    """Return the rank that a job without `targetModules` adds to each weight, as multiples of r."""
    from finetune_trainer.model.adapters import attach_lora

    try:
        adapted: Any = attach_lora(model, LoraSettings(r=1))
    except ConfigError:  # of families that peft cannot adapt, which the trainer refuses itself
        return {}
    factors: dict[Any, int] = {}
    for module in adapted.modules():
        ranks = getattr(module, "lora_A", {})
        if "default" not in ranks:
            continue
        is_stacked = hasattr(module, "parameter_name")
        weight = module.get_param() if is_stacked else module.get_base_layer().weight
        rank = ranks["default"].weight.shape[0]
        factors[weight] = rank // weight.shape[0] if is_stacked else rank
    return factors
