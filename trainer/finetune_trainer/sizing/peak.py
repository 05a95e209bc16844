"""Compute the peak memory of a step on one rank, by component; no device is needed.

Only a few moments of a step can be the peak: the head, its gradient, the backward pass of the last
and of the first layer, the embedding's gradient, and the optimizer; under FSDP also the gathering
of embedding and head. The live tensors follow from the tensors that autograd saves, from sharding,
and from recomputation. `test_memory_peak.py` compares with a trace.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from finetune_trainer.config import TrainConfig
from finetune_trainer.sizing.activations import Activations
from finetune_trainer.sizing.model_shape import Layer, ModelShape, Weight, trained_count
from finetune_trainer.sizing.moments import moment_nbytes
from finetune_trainer.sizing.zero import (
    MOST_IN_BUCKET,
    engine_state,
    gathered_bytes,
    reduction_bytes,
    stage_of,
    update_bytes,
)

COMPONENTS = (
    "parameters",
    "buffers",
    "moments",
    "gradients",
    "whole gradients",
    "autocast copies",
    "gathered layers",
    "activations",
    "logits",
    "engine buffers",
)
ELEMENTS_PER_PASS = 2**22
"""Elements that the 8-bit optimizer updates at once on a GPU: enough to occupy it."""
UPDATE_BYTES = 37
"""Temporary bytes of an uncompiled 8-bit update per element, measured on an H100."""
CHUNK_BYTES = 2**29  # of the head's logits; `fused_head` uses the same size on a GPU


@dataclass(frozen=True)
class Peak:
    """Memory on one rank at the peak of a step.

    Attributes:
        moment: Name of the moment.
        parts: Bytes by component, of `COMPONENTS`.
        moments: Bytes of every moment, by name.
    """

    moment: str
    parts: Mapping[str, int]
    moments: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes at the peak."""
        return sum(self.parts.values())

    @property
    def static(self) -> int:
        """Bytes that are allocated between two steps."""
        return sum(self.parts[name] for name in ("parameters", "buffers", "moments"))

    @property
    def largest(self) -> str:
        """The largest component."""
        return max(self.parts, key=lambda name: self.parts[name])


def step_peak(
    shape: ModelShape,
    config: TrainConfig,
    *,
    tokens: int | None = None,
    keeps_scores: bool = False,
) -> Peak:
    """Return the peak of a step of `config` on each rank.

    If the strategy decides by free memory whether tensors stay unsharded, they count as sharded.

    Args:
        shape: Shape of the model with its trained parameters.
        config: Method, strategy, precision, batch and world.
        tokens: Tokens of a micro-batch; `micro_batch_size * max_seq_len` by default.
        keeps_scores: Whether no fused attention kernel supports model and GPU.
    """
    rows = config.training.micro_batch_size * config.data.max_seq_len
    return _Step(shape, config, tokens or rows, keeps_scores).peak()


class _Step:
    """A step of one rank; every method returns bytes."""

    def __init__(
        self, shape: ModelShape, config: TrainConfig, tokens: int, keeps_scores: bool
    ) -> None:
        self.shape, self.config, self.tokens = shape, config, tokens
        self.activations = kept = Activations(shape, config, tokens, keeps_scores=keeps_scores)
        self.item_size, self.sum_size, self.residual = kept.item_size, kept.sum_size, kept.residual
        self.is_sharded, self.is_autocast = kept.is_sharded, kept.is_autocast
        self.zero_stage = stage_of(config)
        replicas = config.strategy.replicas
        self.shards = config.world.world_size // replicas if self.is_sharded else 1
        self.optimizer = config.training.optimizer
        self.recompute = config.strategy.activation_checkpointing
        self.accumulates = config.gradient_accumulation_steps > 1

    def peak(self) -> Peak:
        shape = self.shape
        moments = {
            "head": self.at_head(),
            "last layer's backward": self.at_last_layer(),
            "first layer's backward": self.at_first_layer(),
            "embedding's gradient": self.at_embedding(),
            "optimizer": self.at_optimizer(),
        }
        if self.is_sharded:
            moments |= {
                "embedding is gathered": self.at_gathering(shape.embedding or shape.others, 0),
                "head is gathered": self.at_gathering(
                    shape.head, self.activations.saved_by_layers()
                ),
                "head's gradient": self.at_head_gradient(),
            }
        if self.zero_stage:
            moments["gradients are reduced"] = self.at_reduction()
        sums = {name: sum(parts.values()) for name, parts in moments.items()}
        highest = max(sums, key=lambda name: sums[name])
        parts = {name: moments[highest].get(name, 0) for name in COMPONENTS}
        return Peak(highest, parts, sums)

    # ---- always allocated

    def static(self) -> dict[str, int]:
        if self.zero_stage:
            return engine_state(self.shape, self.config, self.item_size)
        if self.config.strategy.offload == "cpu":
            return {"buffers": self.shape.buffer_bytes}
        return {
            "parameters": self.shape.sum_weights(lambda w: w.shard_nbytes(self.shards)),
            "buffers": self.shape.buffer_bytes,
            "moments": self.shape.sum_weights(self.moments_of),
        }

    def moments_of(self, weight: Weight) -> int:
        return moment_nbytes(weight, self.shards, self.optimizer) if weight.is_trained else 0

    def gradients(self) -> int:
        if self.zero_stage:
            return self.gradients_of_engine()
        if self.config.strategy.offload == "cpu":
            return 0
        return self.shape.sum_weights(lambda w: w.is_trained * w.shard_nbytes(self.shards))

    def gradients_of_engine(self) -> int:
        """Return the bytes of ZeRO's gradients in addition to the static state."""
        trained = self.num_trained()
        if self.zero_stage == 1:
            return self.item_size * trained
        ranks = self.config.world.world_size
        return self.sum_size * trained // ranks if self.zero_stage == 2 else 0

    def whole_gradients(self) -> int:
        """Sum FSDP's unsharded fp32 gradients over micro-batches, if the strategy retains them."""
        keeps = self.config.strategy.reduce_each_micro_batch is False
        if not (self.is_sharded and keeps and self.accumulates):
            return 0
        return self.num_trained() * self.sum_size

    def num_trained(self) -> int:
        """Return the number of trained elements."""
        return self.shape.sum_weights(lambda w: w.is_trained * w.count)

    def earlier_gradients(self) -> dict[str, int]:
        """Gradients that exist before the backward pass of the last micro-batch."""
        if self.whole_gradients():
            return {"whole gradients": self.whole_gradients()}
        has_buckets = self.config.strategy.type == "ddp" and self.config.world.world_size > 1
        return {"gradients": self.gradients() if self.accumulates or has_buckets else 0}

    # ---- moments

    def at_gathering(self, weights: tuple[Weight, ...], activations: int) -> dict[str, int]:
        """Return the parts while FSDP copies gathered weights, when two of its buffers exist."""
        return {
            **self.static(),
            **self.earlier_gradients(),
            "gathered layers": self.gathered(layers=0) + self.buffer + 2 * self.full(weights),
            "activations": activations,
        }

    def at_head(self) -> dict[str, int]:
        return {
            **self.static(),
            **self.earlier_gradients(),
            "autocast copies": self.copies_of_layers() + self.head_copy(),
            "gathered layers": self.gathered(layers=0, head=True) + self.is_sharded * self.buffer,
            "activations": self.activations.saved_by_layers() + self.activations.outside_layers(),
            "logits": self.head(self.tokens, self.shape.hidden),
        }

    def at_head_gradient(self) -> dict[str, int]:
        """Return the parts while FSDP reduces the head's gradient, before any layer's backward."""
        whole = trained_count(self.shape.head) * (self.item_size + self.sum_size)
        return {
            **self.static(),
            **self.earlier_gradients(),
            "gathered layers": self.gathered(layers=1) + whole,
            "activations": self.activations.saved_by_layers(),
            "logits": self.head_gradient(),
        }

    def at_last_layer(self) -> dict[str, int]:
        layer = self.shape.kinds[self.shape.order[-1]]
        gathered = self.gathered(layers=1) + self.gradients_of_layer(layer, before=self.shape.head)
        return {
            **self.static(),
            **self.earlier_gradients(),
            "autocast copies": self.copies_in_backward(len(self.shape.order)),
            "gathered layers": gathered,
            "activations": self.activations.saved_by_layers() + self.activations.in_backward(layer),
            "logits": self.head_gradient(),
        }

    def at_first_layer(self) -> dict[str, int]:
        layer = self.shape.kinds[self.shape.order[0]]
        gradients = self.earlier_gradients() | (
            {} if self.whole_gradients() else {"gradients": self.gradients()}
        )
        is_replicated = not (self.is_sharded or self.zero_stage)
        if is_replicated and self.shape.head_trained:  # counted at the embedding's gradient
            own = self.shape.vocabulary * self.shape.hidden * self.shape.head_itemsize
            gradients["gradients"] -= (not self.accumulates) * own * (2 - self.shape.is_tied)
        return {
            **self.static(),
            **gradients,
            "autocast copies": self.copies_in_backward(1),
            "gathered layers": self.gathered(layers=1) + self.gradients_of_layer(layer),
            "activations": self.activations.saved(layer) + self.activations.in_backward(layer),
            "logits": self.head_gradient(),
        }

    def at_embedding(self) -> dict[str, int]:
        shape = self.shape
        parts = {**self.static(), **self.earlier_gradients()}
        if not self.whole_gradients():
            parts["gradients"] = self.gradients()
        if not shape.head_trained:
            return parts
        size = shape.vocabulary * shape.hidden
        if self.is_sharded:
            # Unsharded weights are freed before the gradients are copied to fp32 for the reduction.
            tables = 1 if shape.is_tied or shape.head else 2
            parts["gathered layers"] = size * tables * (self.sum_size + self.item_size)
        elif shape.is_tied:  # the embedding's gradient, and its sum with the head's
            parts["logits"] = 2 * size * shape.head_itemsize
        elif self.accumulates:
            parts["logits"] = size * shape.head_itemsize
        return parts

    def at_reduction(self) -> dict[str, int]:
        """Return the parts while ZeRO reduces a bucket of gradients.

        If a bucket holds all gradients, it is reduced after the backward pass.
        """
        trained = self.num_trained()
        parts = self.at_last_layer() if trained > MOST_IN_BUCKET else self.static()
        parts["gradients"] = self.gradients()
        parts["engine buffers"] += reduction_bytes(trained, self.config, self.item_size)
        return parts

    def at_optimizer(self) -> dict[str, int]:
        parts = {**self.static(), "gradients": self.gradients()}
        if self.optimizer == "adamw8bit":  # an uncompiled update; a compiled one needs less
            largest = self.shape.largest_weight(lambda w: w.is_trained * -(-w.count // self.shards))
            parts["moments"] += UPDATE_BYTES * min(largest, ELEMENTS_PER_PASS)
        if self.zero_stage == 3:
            parts["engine buffers"] += update_bytes(self.num_trained(), self.config)
        return parts

    # ---- head

    def head(self, tokens: int, hidden: int) -> int:
        """Return the bytes of fp32 gradient sums and two chunks of logits, or all logits thrice."""
        size, vocabulary = self.sum_size, self.shape.vocabulary
        if not self.config.training.fused_head:  # log-probabilities, their gradient and the logits'
            return 3 * tokens * vocabulary * size
        rows = min(
            tokens, max(1, CHUNK_BYTES // (vocabulary * size + hidden * self.item_size + 64))
        )
        sums = tokens * hidden * size
        if self.shape.head_trained:
            sums += vocabulary * hidden * size
        return sums + 2 * rows * vocabulary * size

    def head_gradient(self) -> int:
        """Return the bytes that the head retains for backward."""
        size = self.tokens * self.shape.hidden * self.residual
        if self.shape.head_trained and not (self.is_sharded and self.shape.head):
            item = self.item_size if self.is_sharded else self.shape.head_itemsize
            size += self.shape.vocabulary * self.shape.hidden * item
        return size

    def head_copy(self) -> int:
        copied = self.is_autocast and self.shape.head_itemsize > self.item_size
        return self.shape.vocabulary * self.shape.hidden * self.item_size * copied

    # ---- copies of weights

    def copies_of_layers(self) -> int:
        return self.shape.sum_layers(self.copies)

    def copies_in_backward(self, layers: int) -> int:
        """Return the bytes of autocast copies: without recomputation autograd retains them all."""
        if layers == len(self.shape.order) and self.recompute != "full":
            return self.copies_of_layers()
        return self.copies(self.shape.kinds[self.shape.order[0]])

    def copies(self, layer: Layer) -> int:
        if self.is_sharded or self.item_size >= 4:
            return 0
        own = sum(p.inputs * p.outputs for p in layer.products) if self.is_autocast else 0
        adapters = sum(p.rank * (p.inputs + p.outputs) for p in layer.products)
        return self.item_size * (own + adapters)

    def gathered(self, *, layers: int, head: bool = False) -> int:
        """Return the bytes of weights gathered by FSDP: root, some layers, and retained groups."""
        if self.zero_stage == 3:
            return gathered_bytes(self.shape, self.config, self.item_size)
        shape, keeps = self.shape, self.config.strategy.reshard_after_forward is False
        size = self.full(shape.others) - self.full(shape.embedding) - self.full(shape.head)
        size += keeps * self.full(shape.embedding)
        size += (head or (keeps and self.accumulates)) * self.full(shape.head)
        layers = len(shape.order) if keeps else layers
        return size + layers * self.buffer

    @property
    def buffer(self) -> int:
        """Bytes of the gathering buffer, which lives until the next group is gathered."""
        return max(self.full(kind.weights) for kind in self.shape.kinds)

    def full(self, weights: tuple[Weight, ...]) -> int:
        return sum(w.gathered_nbytes(self.item_size) for w in weights) * self.is_sharded

    def gradients_of_layer(self, layer: Layer, *, before: tuple[Weight, ...] = ()) -> int:
        """Return the bytes of FSDP's gradients of a layer, and of its or `before`'s in fp32.

        The gathering buffer is released before the gradients are complete.
        """
        if not self.is_sharded:
            return 0
        own = trained_count(layer.weights)
        gradients = own * self.item_size + max(own, trained_count(before)) * self.sum_size
        return max(self.buffer, gradients)
