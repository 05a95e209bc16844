"""A model with its trained parameters, dtypes and adapters, as `peak` needs it.

`with_method` creates it from a `BaseShape`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass


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
        is_quantized: Whether the weight is stored in 4 or 8 bits.
        is_transposed: Whether it is a product of GPT-2, which selective recomputation repeats.
    """

    inputs: int
    outputs: int
    rank: int
    is_trained: bool
    is_quantized: bool
    is_transposed: bool = False

    @property
    def keeps_input(self) -> bool:
        """Whether the backward pass needs the input."""
        return self.is_trained or self.rank > 0


@dataclass(frozen=True)
class Experts:
    """Experts of a layer, whose weights are stacked in one parameter per product.

    Attributes:
        count: Number of experts.
        per_token: Routed experts that a token uses.
        width: Features per token between the products of an expert.
        is_adapted: Whether adapters extend them; peft then merges weights and adapters of all
            experts in each forward pass.
        is_trained: Whether their weights are trained.
        shared: Features per token between the products of the shared expert; 0 without one.
    """

    count: int
    per_token: int
    width: int
    is_adapted: bool
    is_trained: bool
    shared: int


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
        experts: Experts instead of one MLP; None without experts.
        other_norms: Widths of norms over other sizes.
        has_other: Whether the layer has matrices of operations whose activations are unknown.
    """

    weights: tuple[Weight, ...]
    into_attention: tuple[Product, ...]
    out_of_attention: Product | None
    into_mlp: tuple[Product, ...]
    out_of_mlp: Product | None
    norms: int
    head_norms: tuple[int, ...]
    norms_trained: bool
    experts: Experts | None = None
    other_norms: tuple[int, ...] = ()
    has_other: bool = False

    @property
    def products(self) -> tuple[Product, ...]:
        """All products of attention and MLP."""
        ends = tuple(p for p in (self.out_of_attention, self.out_of_mlp) if p is not None)
        return (*self.into_attention, *self.into_mlp, *ends)

    @property
    def is_known(self) -> bool:
        """Whether its activations can be counted: attention, and an MLP or experts."""
        has_mlp = self.out_of_mlp is not None or self.experts is not None
        has_attention = self.out_of_attention is not None
        return has_attention and has_mlp and self.norms > 0 and not self.has_other


@dataclass(frozen=True)
class ModelShape:
    """A decoder without the values of its weights.

    Attributes:
        kinds: Different decoder layers.
        order: Index into `kinds` of each decoder layer.
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
        activation: Activation function of the MLP, by its name in transformers.
        fused_attention: Names of our attention kernels that support the model.
        score_bytes: Bytes per head and pair of tokens that the model's own attention retains.
        scales_norms_in_fp32: Whether norms multiply with their weights in fp32.
        is_rotary: Whether queries and keys are rotated by their positions.
    """

    kinds: tuple[Layer, ...]
    order: tuple[int, ...]
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
    activation: str = ""
    fused_attention: tuple[str, ...] = ()
    score_bytes: int = 0
    scales_norms_in_fp32: bool = False
    is_rotary: bool = False

    @property
    def is_known(self) -> bool:
        """Whether the activations of all layers can be counted."""
        return bool(self.order) and all(kind.is_known for kind in self.kinds)

    def sum_layers(self, size_of: Callable[[Layer], int], first: int = 0) -> int:
        """Return the sum over the layers from `first` on; `size_of` is called once per kind."""
        order = self.order[first:]
        return sum(order.count(kind) * size_of(self.kinds[kind]) for kind in set(order))

    def sum_weights(self, size_of: Callable[[Weight], int]) -> int:
        """Return the sum over all parameters."""
        inside = self.sum_layers(lambda layer: sum(map(size_of, layer.weights)))
        return inside + sum(map(size_of, self.others))

    def largest_weight(self, size_of: Callable[[Weight], int]) -> int:
        """Return the maximum over all parameters."""
        weights = (weight for kind in self.kinds for weight in kind.weights)
        return max(map(size_of, (*weights, *self.others)))


def trained_count(weights: tuple[Weight, ...]) -> int:
    """Return the number of trained elements."""
    return sum(weight.count for weight in weights if weight.is_trained)
