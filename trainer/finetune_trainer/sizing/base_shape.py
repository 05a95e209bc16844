"""A pretrained model as named tensors with roles, without torch and independent of a method.

`memory.read_base` reads it from a model on the meta device. `with_method` adds adapters, trained
parameters and dtypes.
"""

from collections.abc import Iterator
from enum import StrEnum

from finetune_trainer.config import ContractModel


class Role(StrEnum):
    """Part that a tensor plays in a layer."""

    INTO_ATTENTION = "intoAttention"
    OUT_OF_ATTENTION = "outOfAttention"
    INTO_MLP = "intoMlp"
    OUT_OF_MLP = "outOfMlp"
    ROUTER = "router"
    INTO_EXPERTS = "intoExperts"
    OUT_OF_EXPERTS = "outOfExperts"
    INTO_SHARED_EXPERT = "intoSharedExpert"
    OUT_OF_SHARED_EXPERT = "outOfSharedExpert"
    VECTOR = "vector"
    """Weight of a norm, bias, or another tensor of one dimension."""
    OTHER = "other"
    """Matrix of an operation whose activations are unknown."""


EXPERTS = (Role.INTO_EXPERTS, Role.OUT_OF_EXPERTS)
"""Roles of tensors that stack the matrices of all experts."""


class BaseTensor(ContractModel):
    """A parameter.

    Attributes:
        name: Name in its layer, or in the model if it is outside of layers.
        shape: Lengths of its dimensions.
        is_linear: Whether it is the weight of a linear layer, which quantization stores in fewer
            bits and `targetModules` may name.
        is_transposed: Whether the first dimension is the input, as in GPT-2.
        lora_factor: Rank of the adapter that a job without `targetModules` attaches, in units of
            `r` (per expert); 0 without an adapter.
        is_fp32: Whether the model stores it in fp32 in any precision.
        is_constant: Whether no method trains it.
    """

    name: str
    shape: tuple[int, ...]
    role: Role = Role.OTHER
    is_linear: bool = False
    is_transposed: bool = False
    lora_factor: int = 0
    is_fp32: bool = False
    is_constant: bool = False

    @property
    def inputs(self) -> int:
        """Input features of a matrix."""
        return self.shape[-2] if self.is_transposed else self.shape[-1]

    @property
    def outputs(self) -> int:
        """Output features of a matrix."""
        return self.shape[-1] if self.is_transposed else self.shape[-2]


class LayerKind(ContractModel):
    """A decoder layer; layers with equal tensors are of one kind.

    Attributes:
        tensors: All parameters.
        norms: Number of norms over the hidden size.
        other_norms: Widths of norms over other sizes, except head norms.
        has_head_norms: Whether queries and keys are normalised.
    """

    tensors: tuple[BaseTensor, ...]
    norms: int
    other_norms: tuple[int, ...] = ()
    has_head_norms: bool = False


class BaseShape(ContractModel):
    """A pretrained decoder without the values of its weights.

    Attributes:
        family: `model_type` of its configuration.
        kinds: Kinds of decoder layers; empty if the layers cannot be found.
        order: Index into `kinds` of each layer.
        layers_name: Name of the list of layers in the model.
        others: Parameters outside of layers: embeddings, head, last norm.
        embedding: Names in `others` that FSDP gathers for the embedding alone.
        head: Names in `others` that FSDP gathers for the head alone.
        head_weight: Name of the head's weight, or of the embedding's if they are tied; None without
            a head.
        hidden: Features per token between layers.
        heads: Number of query heads; 0 if the configuration has none.
        vocabulary: Rows of the head.
        is_tied: Whether embedding and head are one parameter.
        experts_per_token: Routed experts that a token uses; 0 without experts.
        activation: Activation function of the MLP, by its name in transformers.
        fused_attention: Names of our attention kernels that support the model.
        score_bytes: Bytes per head and pair of tokens that the model's own attention retains for
            backward; 0 if it uses torch's fused attention.
        scales_norms_in_fp32: Whether the results of norms are multiplied with their weights in fp32
            in any precision.
        is_rotary: Whether queries and keys are rotated by their positions.
        buffer_bytes: Bytes of all buffers.
    """

    family: str
    kinds: tuple[LayerKind, ...]
    order: tuple[int, ...]
    layers_name: str
    others: tuple[BaseTensor, ...]
    embedding: tuple[str, ...]
    head: tuple[str, ...]
    head_weight: str | None
    hidden: int
    heads: int
    vocabulary: int
    is_tied: bool
    experts_per_token: int = 0
    activation: str = ""
    fused_attention: tuple[str, ...] = ()
    score_bytes: int = 0
    scales_norms_in_fp32: bool = False
    is_rotary: bool = False
    buffer_bytes: int = 0

    def tensors(self) -> Iterator[tuple[str, BaseTensor]]:
        """Yield all parameters with their names in the model."""
        for index, kind in enumerate(self.order):
            for tensor in self.kinds[kind].tensors:
                yield f"{self.layers_name}.{index}.{tensor.name}", tensor
        yield from ((tensor.name, tensor) for tensor in self.others)
