"""Describe a model for the peak formula, read from a model without weights.

`check` builds the model on the meta device. A caller without torch can create the same dataclasses
in another way, because `peak` needs only these.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Weight:
    """A parameter: number of elements, bytes per element, length of the first dimension."""

    count: int
    itemsize: int
    rows: int
    is_trained: bool
    bits: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded weight, with scales if it is stored in 4 or 8 `bits`.

        nf4 has a doubly quantised scale per 64 elements, int8 one per row.
        """
        if self.bits == 8:
            return self.count + 4 * self.rows
        if self.bits == 4:
            return self.count // 2 + self.count // 64 + 4 * math.ceil(self.count / 64 / 256)
        return self.count * self.itemsize

    def gathered_nbytes(self, itemsize: int) -> int:
        """Bytes of the gathered weight; unquantised ones have elements of `itemsize` bytes."""
        return self.nbytes if self.bits else self.count * itemsize

    def shard_nbytes(self, ranks: int) -> int:
        """Bytes of rank 0's rows if `ranks` divide the first dimension."""
        rows = math.ceil(self.rows / ranks)
        return math.ceil(self.nbytes / self.rows * rows)


@dataclass(frozen=True)
class Product:
    """A matrix product of a layer.

    Attributes:
        inputs: Features per token of the input.
        outputs: Features per token of the output.
        rank: Rank of the adapter; 0 without an adapter.
        is_trained: Whether the weight itself is trained.
        is_quantized: Whether the weight is stored in 4 bits.
    """

    inputs: int
    outputs: int
    rank: int
    is_trained: bool
    is_quantized: bool

    @property
    def keeps_input(self) -> bool:
        """Whether the backward pass needs the input."""
        return self.is_trained or self.rank > 0


@dataclass(frozen=True)
class Layer:
    """A decoder layer.

    Attributes:
        weights: All parameters.
        into_attention: Query, key and value projections.
        out_of_attention: Output projection of attention.
        into_mlp: One product, or gate and up projection.
        out_of_mlp: Down projection.
        norms: Number of norms over the hidden size.
        head_norms: Widths of per-head norms: all queries, all keys.
        norms_trained: Whether the weights of norms are trained.
    """

    weights: tuple[Weight, ...]
    into_attention: tuple[Product, ...]
    out_of_attention: Product | None
    into_mlp: tuple[Product, ...]
    out_of_mlp: Product | None
    norms: int
    head_norms: tuple[int, ...]
    norms_trained: bool

    @property
    def is_known(self) -> bool:
        """Whether its activations can be counted: attention, and one MLP for all tokens."""
        return None not in (self.out_of_attention, self.out_of_mlp) and self.norms > 0


@dataclass(frozen=True)
class ModelShape:
    """A decoder without the values of its weights.

    Attributes:
        layers: Decoder layers in order.
        others: Parameters outside of layers: embeddings, head, last norm.
        embedding: Parameters in `others` that FSDP gathers for the embedding alone; empty if the
            head shares them.
        head: Parameters in `others` that FSDP gathers for the head alone.
        hidden: Features per token between layers.
        heads: Number of query heads.
        vocabulary: Rows of the head.
        is_tied: Whether embedding and head are one parameter.
        head_trained: Whether the head is trained.
        head_itemsize: Bytes per element of the head's weight.
        buffer_bytes: Bytes of all buffers.
    """

    layers: tuple[Layer, ...]
    others: tuple[Weight, ...]
    embedding: tuple[Weight, ...]
    head: tuple[Weight, ...]
    hidden: int
    heads: int
    vocabulary: int
    is_tied: bool
    head_trained: bool
    head_itemsize: int
    buffer_bytes: int

    @property
    def weights(self) -> tuple[Weight, ...]:
        """All parameters."""
        return tuple(w for layer in self.layers for w in layer.weights) + self.others


def read_shape(model: "nn.Module", layers: Sequence["nn.Module"], *, bits: int = 0) -> ModelShape:
    """Read the shape of a transformers or peft model whose `requires_grad` flags are final.

    Args:
        model: The model; it may be on the meta device.
        layers: Decoder layers of `model`.
        bits: Bits in which the decoder's linear layers will be stored; 0 if unquantised.
    """
    from finetune_trainer.model.ends import untied_embedding_and_head
    from finetune_trainer.model.loss import base_of

    base = base_of(model)
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    config = base.config.get_text_config()
    weight = getattr(head, "weight", None)
    hidden = int(config.hidden_size)
    shapes = tuple(_layer(layer, hidden, bits=bits) for layer in layers)
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    others = {p: None for p in model.parameters() if p not in inside}
    ends = untied_embedding_and_head(base, layers)
    return ModelShape(
        layers=shapes,
        others=tuple(_weight(p) for p in others),
        embedding=_weights(ends[0]),
        head=_weights(ends[1]),
        hidden=hidden,
        heads=int(config.num_attention_heads),
        vocabulary=int(weight.shape[0]) if weight is not None else int(config.vocab_size),
        is_tied=weight is not None and weight is embedding.weight,
        head_trained=weight is not None and weight.requires_grad,
        head_itemsize=weight.element_size() if weight is not None else 4,
        buffer_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
    )


def _layer(layer: "nn.Module", hidden: int, *, bits: int) -> Layer:
    attention: list[Product] = []
    mlp: list[Product] = []
    packed: set[Any] = set()
    adapted = [module for module in layer.modules() if hasattr(module, "base_layer")]
    inside = {part for module in adapted for part in module.modules() if part is not module}
    for name, module in layer.named_modules():
        product = _product(module, bits=bits)
        if product is None or module in inside:
            continue
        if bits:
            packed.add(_plain(module).weight)
        (attention if "attn" in name or "attention" in name else mlp).append(product)
    norms = [
        (name, module)
        for name, module in layer.named_modules()
        if type(module).__name__.endswith(("Norm", "NormGated")) and module._parameters
    ]
    full_width = [
        module
        for name, module in norms
        if max(p.numel() for p in module.parameters()) == hidden
        and not name.endswith(("q_norm", "k_norm"))
    ]
    outs = [p.outputs for p in attention]
    return Layer(
        weights=tuple(_weight(p, bits=bits if p in packed else 0) for p in layer.parameters()),
        into_attention=tuple(attention[:-1]),
        out_of_attention=attention[-1] if len(attention) > 1 else None,
        into_mlp=tuple(mlp[:-1]),
        out_of_mlp=mlp[-1] if 2 <= len(mlp) <= 3 else None,
        norms=len(full_width),
        head_norms=tuple(outs[:2]) if any(n.endswith("q_norm") for n, _ in norms) else (),
        norms_trained=any(p.requires_grad for m in full_width for p in m.parameters()),
    )


def _product(module: "nn.Module", *, bits: int) -> Product | None:
    """Read a linear layer with its adapter, if any; None for other modules."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    plain = _plain(module)
    if not isinstance(plain, nn.Linear | Conv1D):
        return None
    shape = tuple(plain.weight.shape)
    outputs, inputs = shape if isinstance(plain, nn.Linear) else shape[::-1]
    ranks = getattr(module, "r", {}) if plain is not module else {}
    return Product(
        inputs=inputs,
        outputs=outputs,
        rank=max(ranks.values(), default=0),
        is_trained=plain.weight.requires_grad,
        is_quantized=bits > 0,
    )


def _plain(module: Any) -> Any:
    """Return the layer inside an adapter, or the module itself."""
    return module.base_layer if hasattr(module, "base_layer") else module


def _weights(module: "nn.Module | None") -> tuple[Weight, ...]:
    return () if module is None else tuple(_weight(p) for p in module.parameters())


def _weight(parameter: Any, *, bits: int = 0) -> Weight:
    return Weight(
        count=parameter.numel(),
        itemsize=parameter.element_size(),
        rows=parameter.shape[0] if parameter.ndim else 1,
        is_trained=parameter.requires_grad,
        bits=bits,
    )
