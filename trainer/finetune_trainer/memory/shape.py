"""What the peak formula needs to know of a model, read off one without weights.

`check` builds the model on the meta device; whoever has no torch can make the same dataclasses by
another way: `peak` does arithmetic on them alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Weight:
    """One parameter: elements, bytes of one, elements of its first dimension's row."""

    count: int
    itemsize: int
    rows: int
    is_trained: bool
    bits: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes in whole, scales included where the weight is kept in 4 or 8 `bits`.

        nf4 has a doubly quantised scale for each 64 elements, int8 one for each row.
        """
        if self.bits == 8:
            return self.count + 4 * self.rows
        if self.bits == 4:
            return self.count // 2 + self.count // 64 + 4 * math.ceil(self.count / 64 / 256)
        return self.count * self.itemsize

    def gathered_nbytes(self, itemsize: int) -> int:
        """Bytes in whole where plain weights are computed with in elements of `itemsize`."""
        return self.nbytes if self.bits else self.count * itemsize

    def shard_nbytes(self, ranks: int) -> int:
        """Bytes of rank 0's rows, where as many ranks divide the first dimension."""
        rows = math.ceil(self.rows / ranks)
        return math.ceil(self.nbytes / self.rows * rows)


@dataclass(frozen=True)
class Product:
    """A matrix product of a layer.

    Attributes:
        inputs: Numbers of a token that go in.
        outputs: And come out.
        rank: Of its adapter; 0 without one.
        is_trained: Its own weight is.
        is_quantized: It is kept in 4 bits.
    """

    inputs: int
    outputs: int
    rank: int
    is_trained: bool
    is_quantized: bool

    @property
    def keeps_input(self) -> bool:
        """Whether backward needs its input."""
        return self.is_trained or self.rank > 0


@dataclass(frozen=True)
class Layer:
    """A decoder layer.

    Attributes:
        weights: All parameters.
        into_attention: Products that make queries, keys and values.
        out_of_attention: The one behind it.
        into_mlp: One product, or gate and up.
        out_of_mlp: The one that ends it.
        norms: How many span the hidden size, and whether their weights are trained.
        head_norms: Widths that norms of single heads go over: all queries, all keys.
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
    """A decoder without its weights' values.

    Attributes:
        layers: In order.
        others: Parameters outside of layers: embeddings, head, last norm.
        embedding: Those of `others` that FSDP gathers for the embedding alone; none where the head
            has them too.
        head: And for the head.
        hidden: Numbers of a token between layers.
        heads: Of the queries.
        vocabulary: Rows of the head.
        is_tied: Embedding and head are one parameter.
        head_trained: And are trained.
        head_itemsize: Bytes of an element of the head's weight.
        buffer_bytes: Of all buffers.
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
    """Read a transformers or peft model whose parameters require gradients as they will.

    Args:
        model: It may be on the meta device.
        layers: Its decoder layers.
        bits: In which the decoder's linear layers will be kept, whatever they are now; 0 for plain.
    """
    from finetune_trainer.model.ends import separate_ends
    from finetune_trainer.model.loss import base_of

    base = base_of(model)
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    config = base.config.get_text_config()
    weight = getattr(head, "weight", None)
    hidden = int(config.hidden_size)
    made = tuple(_layer(layer, hidden, bits=bits) for layer in layers)
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    others = {p: None for p in model.parameters() if p not in inside}
    ends = separate_ends(base, layers)
    return ModelShape(
        layers=made,
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
    wide = [m for n, m in norms if _width(m) == hidden and not n.endswith(("q_norm", "k_norm"))]
    outs = [p.outputs for p in attention]
    return Layer(
        weights=tuple(_weight(p, bits=bits if p in packed else 0) for p in layer.parameters()),
        into_attention=tuple(attention[:-1]),
        out_of_attention=attention[-1] if len(attention) > 1 else None,
        into_mlp=tuple(mlp[:-1]),
        out_of_mlp=mlp[-1] if 2 <= len(mlp) <= 3 else None,
        norms=len(wide),
        head_norms=tuple(outs[:2]) if any(n.endswith("q_norm") for n, _ in norms) else (),
        norms_trained=any(p.requires_grad for m in wide for p in m.parameters()),
    )


def _product(module: "nn.Module", *, bits: int) -> Product | None:
    """Read a linear layer, with its adapter if it has one; None for anything else."""
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


def _width(module: "nn.Module") -> int:
    return max(p.numel() for p in module.parameters())


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
