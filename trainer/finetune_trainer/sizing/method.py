"""Add a method to a pretrained model: trained parameters, dtypes, adapters, quantization.

`model.load`, `model.adapters` and peft have the same rules; tests compare the result with the model
that the trainer builds.
"""

import fnmatch
import math
from collections import Counter
from collections.abc import Collection, Iterable

from finetune_trainer.config import TrainConfig
from finetune_trainer.sizing.base_shape import EXPERTS, BaseShape, BaseTensor, LayerKind, Role
from finetune_trainer.sizing.model_shape import Experts, Layer, ModelShape, Product, Weight

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
"""Bytes per element by precision."""
_BITS = {"none": 0, "nf4": 4, "int8": 8}
_FP32 = 4
_OF_EXPERTS = frozenset(("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"))
"""Modules of experts in checkpoints, whose adapters peft attaches to the stacked weights."""


def base_precision(config: TrainConfig) -> str:
    """Return the precision in which parameters are stored that are not quantised.

    It is fp32 for trained parameters, and the compute dtype for frozen ones. DeepSpeed casts all
    parameters to the compute dtype and keeps fp32 copies of its shards, so for ZeRO every parameter
    is read in the compute dtype.
    """
    if config.training.optimizer == "adamw8bit":
        return "bf16"
    is_zero = config.strategy.type.startswith("zero")
    if config.method.type == "full" and config.training.precision != "fp64" and not is_zero:
        return "fp32"
    return config.training.precision


def is_loaded_once(config: TrainConfig) -> bool:
    """Whether only rank 0 reads the weights, because the strategy distributes the shards.

    DoRA measures quantised weights, so every rank needs them.
    """
    lora = config.method.lora
    measures = config.method.quantization != "none" and lora is not None and lora.dora
    return config.strategy.type in ("fsdp", "zero3") and not measures


def with_method(base: BaseShape, config: TrainConfig) -> ModelShape:
    """Return the shape of the model that `config` trains."""
    method = _Method(base, config)
    frozen = method.frozen_names()
    layers = [
        method.layer(base.kinds[kind], f"{base.layers_name}.{index}.", frozen)
        for index, kind in enumerate(base.order)
    ]
    kinds = tuple(dict.fromkeys(layers))
    index_of = {layer: index for index, layer in enumerate(kinds)}
    others = {  # transformers quantises a vision tower, but not the head
        one.name: method.weights(
            one, one.name, frozen, bits=0 if one.name == base.head_weight else method.bits
        )
        for one in base.others
    }
    new_rows = method.new_rows()
    head = next((one for one in base.others if one.name == base.head_weight), None)
    return ModelShape(
        kinds=kinds,
        order=tuple(index_of[layer] for layer in layers),
        others=(*_chain(others.values()), *new_rows),
        embedding=(*_chain(others[name] for name in base.embedding), *new_rows[:1])
        if base.embedding
        else (),
        head=(*_chain(others[name] for name in base.head), *new_rows[1:]) if base.head else (),
        hidden=base.hidden,
        heads=base.heads,
        vocabulary=base.vocabulary,
        is_tied=base.is_tied,
        head_trained=head is not None and method.is_full and head.name not in frozen,
        head_itemsize=_FP32 if head is None else method.itemsize_of(head),
        buffer_bytes=base.buffer_bytes,
        activation=base.activation,
        fused_attention=base.fused_attention,
        score_bytes=base.score_bytes,
        scales_norms_in_fp32=base.scales_norms_in_fp32,
        is_rotary=base.is_rotary,
    )


class _Method:
    """Rules of one configuration."""

    def __init__(self, base: BaseShape, config: TrainConfig) -> None:
        self.base, self.config = base, config
        self.itemsize = ITEMSIZE[base_precision(config)]
        self.is_full = config.method.lora is None
        self.bits = _BITS[config.method.quantization]

    def frozen_names(self) -> Collection[str]:
        """Return the names of the parameters that full fine-tuning does not train."""
        tensors = dict(self.base.tensors())
        frozen = {name for name, tensor in tensors.items() if tensor.is_constant}
        for pattern in self.config.method.freeze:
            frozen.update(fnmatch.filter(tensors, pattern))
        return frozen

    def itemsize_of(self, tensor: BaseTensor) -> int:
        return max(_FP32, self.itemsize) if tensor.is_fp32 else self.itemsize

    def rank(self, tensor: BaseTensor, name: str) -> int:
        """Return the rank of the adapter of a tensor, per expert; 0 without an adapter."""
        lora = self.config.method.lora
        if lora is None:
            return 0
        if not lora.target_modules:
            return tensor.lora_factor * lora.r
        module = f".{name.removesuffix('.weight')}"
        is_named = any(module.endswith(f".{end}") for end in lora.target_modules)
        return lora.r if tensor.is_linear and is_named else 0

    def weights(
        self, tensor: BaseTensor, name: str, frozen: Collection[str], bits: int = 0
    ) -> tuple[Weight, ...]:
        """Return a parameter and its adapter, which is stored in fp32."""
        count = math.prod(tensor.shape)
        own = Weight(
            count=count,
            itemsize=self.itemsize_of(tensor),
            rows=tensor.shape[0] if tensor.shape else 1,
            is_trained=self.is_full and name not in frozen,
            bits=bits if tensor.is_linear else 0,
        )
        rank = self.rank(tensor, name)
        if not rank:
            return (own,)
        lora = self.config.method.lora
        assert lora is not None, "an adapter has settings"
        rank *= tensor.shape[0] if tensor.role in EXPERTS else 1
        rows = [(rank, rank * tensor.inputs), (tensor.outputs, tensor.outputs * rank)]
        if lora.dora and tensor.role not in EXPERTS:
            rows.append((tensor.outputs, tensor.outputs))
        adapter = (Weight(size, _FP32, length, is_trained=True) for length, size in rows)
        return (own, *adapter)

    def new_rows(self) -> tuple[Weight, ...]:
        """Return the rows of added tokens that adapters train, of the embedding and of the head."""
        num_new = len(self.config.model.add_tokens)
        if self.is_full or not num_new:
            return ()
        rows = Weight(num_new * self.base.hidden, _FP32, num_new, is_trained=True)
        return (rows,) if self.base.is_tied or self.base.head_weight is None else (rows, rows)

    def layer(self, kind: LayerKind, prefix: str, frozen: Collection[str]) -> Layer:
        def named(role: Role) -> tuple[Product, ...]:
            return tuple(
                self.product(one, prefix + one.name, frozen)
                for one in kind.tensors
                if one.role is role
            )

        roles = Counter(one.role for one in kind.tensors)
        attention = named(Role.INTO_ATTENTION)
        vectors = [one for one in kind.tensors if one.role is Role.VECTOR]
        of_norms = [one for one in vectors if "norm" in one.name or one.name.startswith("ln_")]
        trained = [self.is_full and prefix + one.name not in frozen for one in of_norms]
        is_plain = not roles[Role.INTO_EXPERTS]
        return Layer(
            weights=_chain(
                self.weights(one, prefix + one.name, frozen, self.bits) for one in kind.tensors
            ),
            into_attention=attention,
            out_of_attention=_only(named(Role.OUT_OF_ATTENTION)),
            into_mlp=named(Role.INTO_MLP),
            out_of_mlp=_only(named(Role.OUT_OF_MLP)),
            norms=kind.norms,
            head_norms=tuple(one.outputs for one in attention[:2]) if kind.has_head_norms else (),
            norms_trained=any(trained),
            experts=None if is_plain else self.experts(kind, prefix, frozen),
            other_norms=kind.other_norms,
            has_other=bool(roles[Role.OTHER]) or self.renames_targets(kind),
        )

    def product(self, tensor: BaseTensor, name: str, frozen: Collection[str]) -> Product:
        return Product(
            inputs=tensor.inputs,
            outputs=tensor.outputs,
            rank=self.rank(tensor, name),
            is_trained=self.is_full and name not in frozen,
            is_quantized=self.bits > 0,
            is_transposed=tensor.is_transposed,
        )

    def renames_targets(self, kind: LayerKind) -> bool:
        """Whether peft adapts stacked experts in place of the named MLP modules."""
        lora = self.config.method.lora
        is_named = lora is not None and not _OF_EXPERTS.isdisjoint(lora.target_modules)
        return is_named and any(one.role in EXPERTS and one.lora_factor for one in kind.tensors)

    def experts(self, kind: LayerKind, prefix: str, frozen: Collection[str]) -> Experts:
        stacked = [one for one in kind.tensors if one.role in EXPERTS]
        count = stacked[0].shape[0]
        widths = [
            math.prod(one.shape) // (one.shape[0] * self.base.hidden)
            for one in stacked
            if one.role is Role.OUT_OF_EXPERTS
        ]
        shared = [one.inputs for one in kind.tensors if one.role is Role.OUT_OF_SHARED_EXPERT]
        return Experts(
            count=count,
            per_token=self.base.experts_per_token,
            width=max(widths, default=0),
            is_adapted=any(self.rank(one, prefix + one.name) for one in stacked),
            is_trained=self.is_full and any(prefix + one.name not in frozen for one in stacked),
            shared=sum(shared),
        )


def _only(products: tuple[Product, ...]) -> Product | None:
    return products[0] if len(products) == 1 else None


def _chain(groups: Iterable[tuple[Weight, ...]]) -> tuple[Weight, ...]:
    return tuple(weight for group in groups for weight in group)
