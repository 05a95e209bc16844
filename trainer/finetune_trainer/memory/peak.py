"""The memory that a rank's step takes at its peak, by component: arithmetic, without a device.

A step has few moments that can be the highest, and the peak is the largest of them: the head, its
gradient, the backward pass of the last and of the first layer, the embedding's gradient, and the
optimizer; under FSDP also those where embedding and head are gathered. What
is alive at each follows from what autograd keeps (derived below, product by product), from how the
engine shards and from what is recomputed. `test_memory_peak.py` holds it against a trace
of the trainer's own step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from finetune_trainer.config import TrainConfig
from finetune_trainer.memory.moments import moment_nbytes
from finetune_trainer.memory.shape import Layer, ModelShape, Product, Weight

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
)
_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
CHUNK_BYTES = 2**29  # of the head's logits, as `fused_head` has it on a GPU


@dataclass(frozen=True)
class Peak:
    """Bytes on one rank at the highest moment of a step.

    Attributes:
        moment: Which one it is.
        parts: Bytes by component, of `COMPONENTS`.
        others: Bytes of every other moment, by name.
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
        """Bytes that are there between two steps."""
        return sum(self.parts[name] for name in ("parameters", "buffers", "moments"))

    @property
    def largest(self) -> str:
        """The component that takes most."""
        return max(self.parts, key=lambda name: self.parts[name])


def step_peak(shape: ModelShape, config: TrainConfig, *, tokens: int | None = None) -> Peak:
    """Return the peak of a step of `config` on each rank.

    Where the strategy decides by free memory what stays whole, it is counted as not kept.

    Args:
        shape: Of the model, as it will be trained.
        config: Names method, strategy, precision, batch and world.
        tokens: Of a micro-batch; `micro_batch_size * max_seq_len` by default.
    """
    rows = config.training.micro_batch_size * config.data.max_seq_len
    return _Step(shape, config, tokens or rows).peak()


class _Step:
    """One step of one rank; every method returns bytes."""

    def __init__(self, shape: ModelShape, config: TrainConfig, tokens: int) -> None:
        self.shape, self.config, self.tokens = shape, config, tokens
        strategy, training = config.strategy, config.training
        self.narrow = _BYTES[training.precision]
        self.wide = max(4, self.narrow)
        self.is_sharded = strategy.type == "fsdp"
        self.shards = config.world.world_size // strategy.replicas if self.is_sharded else 1
        # FSDP computes in copies of its own; elsewhere autocast narrows what is wide.
        self.is_autocast = not self.is_sharded and self.narrow < min(4, shape.head_itemsize)
        self.residual = self.narrow if self.is_sharded else shape.head_itemsize
        self.optimizer = training.optimizer
        self.how = strategy.activation_checkpointing
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
                "head is gathered": self.at_gathering(shape.head, self.kept_by_layers()),
                "head's gradient": self.at_head_gradient(),
            }
        sums = {name: sum(parts.values()) for name, parts in moments.items()}
        highest = max(sums, key=lambda name: sums[name])
        parts = {name: moments[highest].get(name, 0) for name in COMPONENTS}
        return Peak(highest, parts, sums)

    # ---- what is always there

    def static(self) -> dict[str, int]:
        if self.config.strategy.offload == "cpu":
            return {"buffers": self.shape.buffer_bytes}
        trained, optimizer = [w for w in self.shape.weights if w.is_trained], self.optimizer
        return {
            "parameters": sum(w.shard_nbytes(self.shards) for w in self.shape.weights),
            "buffers": self.shape.buffer_bytes,
            "moments": sum(moment_nbytes(w, self.shards, optimizer) for w in trained),
        }

    def gradients(self) -> int:
        if self.config.strategy.offload == "cpu":
            return 0
        return sum(w.shard_nbytes(self.shards) for w in self.shape.weights if w.is_trained)

    def whole_gradients(self) -> int:
        """FSDP's sums over micro-batches, in fp32 and on each rank, where they are kept."""
        keeps = self.config.strategy.reduce_each_micro_batch is False
        if not (self.is_sharded and keeps and self.accumulates):
            return 0
        return _trained(self.shape.weights) * self.wide

    def earlier_gradients(self) -> dict[str, int]:
        """Gradients that are there before the last micro-batch's backward."""
        if self.whole_gradients():
            return {"whole gradients": self.whole_gradients()}
        has_buckets = self.config.strategy.type == "ddp" and self.config.world.world_size > 1
        return {"gradients": self.gradients() if self.accumulates or has_buckets else 0}

    # ---- moments

    def at_gathering(self, weights: tuple[Weight, ...], activations: int) -> dict[str, int]:
        """FSDP gathers into a buffer, and copies from there; the layer before has left one, too."""
        return {
            **self.static(),
            **self.earlier_gradients(),
            "gathered layers": self.gathered(layers=0) + self.buffer + 2 * self.wholes(weights),
            "activations": activations,
        }

    def at_head(self) -> dict[str, int]:
        return {
            **self.static(),
            **self.earlier_gradients(),
            "autocast copies": self.copies_of_layers() + self.head_copy(),
            "gathered layers": self.gathered(layers=0, head=True) + self.buffer,
            "activations": self.kept_by_layers() + self.beside_layers(),
            "logits": self.head(self.tokens, self.shape.hidden),
        }

    def at_head_gradient(self) -> dict[str, int]:
        """FSDP divides the head's gradient among the ranks before the last layer's backward."""
        whole = _trained(self.shape.head) * (self.narrow + self.wide)
        return {
            **self.static(),
            **self.earlier_gradients(),
            "gathered layers": self.gathered(layers=1) + whole,
            "activations": self.kept_by_layers(),
            "logits": self.head_gradient(),
        }

    def at_last_layer(self) -> dict[str, int]:
        layer = self.shape.layers[-1]
        gathered = self.gathered(layers=1) + self.gradients_of_layer(layer, before=self.shape.head)
        return {
            **self.static(),
            **self.earlier_gradients(),
            "autocast copies": self.copies_in_backward(len(self.shape.layers)),
            "gathered layers": gathered,
            "activations": self.kept_by_layers() + self.in_backward(layer),
            "logits": self.head_gradient(),
        }

    def at_first_layer(self) -> dict[str, int]:
        layer = self.shape.layers[0]
        gradients = self.earlier_gradients() | (
            {} if self.whole_gradients() else {"gradients": self.gradients()}
        )
        if not self.is_sharded and self.shape.head_trained:  # the head's comes with the embedding's
            own = self.shape.vocabulary * self.shape.hidden * self.shape.head_itemsize
            gradients["gradients"] -= (not self.accumulates) * own * (2 - self.shape.is_tied)
        return {
            **self.static(),
            **gradients,
            "autocast copies": self.copies_in_backward(1),
            "gathered layers": self.gathered(layers=1) + self.gradients_of_layer(layer),
            "activations": self.kept(layer) + self.in_backward(layer),
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
            # Whole weights are gone before their gradients, as computed, are put together in fp32.
            tables = 1 if shape.is_tied or shape.head else 2
            parts["gathered layers"] = size * tables * (self.wide + self.narrow)
        elif shape.is_tied:  # the embedding's own, and its sum with the head's
            parts["logits"] = 2 * size * shape.head_itemsize
        elif self.accumulates:
            parts["logits"] = size * shape.head_itemsize
        return parts

    def at_optimizer(self) -> dict[str, int]:
        return {**self.static(), "gradients": self.gradients()}

    # ---- activations

    def kept_by_layers(self) -> int:
        layers, is_tied = self.shape.layers, self.shape.is_tied
        trained = [index for index, layer in enumerate(layers) if _trained(layer.weights)]
        first = min(trained, default=len(layers))
        return sum(map(self.kept, layers[0 if self.shape.head_trained and is_tied else first :]))

    def kept(self, layer: Layer) -> int:
        """Return the bytes that a layer retains from forward to backward."""
        if self.how == "full":
            return self.tokens * self.shape.hidden * self.residual
        if self.how == "selective":
            return self.kept_selectively(layer)
        return self.kept_whole(layer)

    def kept_selectively(self, layer: Layer) -> int:
        """Its input, what attention saves, and results of products: of frozen ones, or of all.

        Layers that are not compiled compute products with a trained weight again.
        """
        each = self.shape.hidden * self.residual + 4 * self.shape.heads
        if layer.out_of_attention is not None:
            each += layer.out_of_attention.inputs * self.narrow
            each += sum(p.outputs for p in layer.into_attention) * self.narrow
        for product in self.products(layer):
            if self.config.training.compile or not product.is_trained:
                each += product.outputs * self.narrow
        return min(self.tokens * each, self.kept_whole(layer))

    def kept_whole(self, layer: Layer) -> int:
        """Everything that autograd keeps of a layer when nothing is recomputed."""
        if not layer.is_known:
            return self.tokens * self.shape.hidden * self.residual
        if self.config.training.compile:
            return self.kept_compiled(layer)
        attention, mlp = layer.out_of_attention, layer.out_of_mlp
        assert attention is not None, "a known layer has both"
        assert mlp is not None, "a known layer has both"
        narrow, hidden = self.narrow, self.shape.hidden
        each = layer.norms * self.norm(hidden, is_trained=layer.norms_trained)
        each += self.inputs_of(layer.into_attention) + self.inputs_of(layer.into_mlp)
        each += sum(p.outputs for p in layer.into_attention) * narrow  # rotated, and values
        each += sum(self.norm(w, is_trained=layer.norms_trained) for w in layer.head_norms)
        each += attention.inputs * narrow + 4 * self.shape.heads  # result and its logsumexp
        gates = sum(p.outputs for p in layer.into_mlp)
        # the gate's input and result, the other factor, and their product
        each += (gates + 2 * mlp.inputs if gates >= 2 * mlp.inputs else gates + mlp.inputs) * narrow
        each += sum(self.adapter(p) for p in self.products(layer))
        return self.tokens * each

    def kept_compiled(self, layer: Layer) -> int:
        """Return the least that a compiler retains: results of products and attention, residuals.

        What is elementwise it may recompute inside its kernels; what it does is not traced here.
        """
        each = layer.norms * self.shape.hidden * self.residual + 4 * self.shape.heads
        each += sum(p.outputs for p in (*layer.into_attention, *layer.into_mlp)) * self.narrow
        if layer.out_of_attention is not None:
            each += layer.out_of_attention.inputs * self.narrow
        return self.tokens * (each + sum(self.adapter(p) for p in self.products(layer)))

    def norm(self, width: int, *, is_trained: bool) -> int:
        """RMSNorm of a token: its input in fp32, and with a trained weight what that multiplies."""
        return width * (max(4, self.residual) + is_trained * self.residual) + 4

    def inputs_of(self, products: tuple[Product, ...]) -> int:
        """Return what products retain of an input: under autocast a copy each, else one for all."""
        kept = [p.inputs for p in products if p.keeps_input]
        if not kept:
            return 0
        if self.is_autocast and self.residual > self.narrow:
            return sum(kept) * self.narrow
        return kept[0] * self.residual

    def adapter(self, product: Product) -> int:
        return product.rank * self.narrow

    def products(self, layer: Layer) -> tuple[Product, ...]:
        ends = tuple(p for p in (layer.out_of_attention, layer.out_of_mlp) if p is not None)
        return (*layer.into_attention, *layer.into_mlp, *ends)

    def in_backward(self, layer: Layer) -> int:
        """Return what a layer's backward needs besides: recomputed values and gradients."""
        mlp = layer.out_of_mlp
        again = self.kept_whole(layer) if self.how != "none" else 0
        hidden = self.tokens * self.shape.hidden * (self.residual + self.narrow)
        wide = 0 if mlp is None else 2 * mlp.inputs * self.narrow * self.tokens
        return again + hidden + wide + self.dequantized(layer)

    def dequantized(self, layer: Layer) -> int:
        """Return the bytes of the largest 4-bit weight, dequantized."""
        return max(
            (p.inputs * p.outputs * self.narrow for p in self.products(layer) if p.is_quantized),
            default=0,
        )

    def beside_layers(self) -> int:
        """Return the bytes of the last norm and of the positions that enter the head."""
        return self.tokens * (
            self.norm(self.shape.hidden, is_trained=self.shape.layers[-1].norms_trained)
            + self.shape.hidden * self.residual
        )

    # ---- head

    def head(self, tokens: int, hidden: int) -> int:
        """Return fp32 gradient sums and two chunks of logits, or all logits three times."""
        wide, vocabulary = self.wide, self.shape.vocabulary
        if not self.config.training.fused_head:  # log-probabilities, their gradient and the logits'
            return 3 * tokens * vocabulary * wide
        rows = min(tokens, max(1, CHUNK_BYTES // (vocabulary * wide + hidden * self.narrow + 64)))
        sums = tokens * hidden * wide
        if self.shape.head_trained:
            sums += vocabulary * hidden * wide
        return sums + 2 * rows * vocabulary * wide

    def head_gradient(self) -> int:
        """Return the bytes that the head retains for backward."""
        size = self.tokens * self.shape.hidden * self.residual
        if self.shape.head_trained and not (self.is_sharded and self.shape.head):
            item = self.narrow if self.is_sharded else self.shape.head_itemsize
            size += self.shape.vocabulary * self.shape.hidden * item
        return size

    def head_copy(self) -> int:
        copied = self.is_autocast and self.shape.head_itemsize > self.narrow
        return self.shape.vocabulary * self.shape.hidden * self.narrow * copied

    # ---- copies of weights

    def copies_of_layers(self) -> int:
        return sum(self.copies(layer) for layer in self.shape.layers)

    def copies_in_backward(self, layers: int) -> int:
        """Autocast's own end with forward; where nothing is recomputed autograd holds them."""
        held = 1 if self.how == "full" else layers
        return sum(self.copies(layer) for layer in self.shape.layers[:held])

    def copies(self, layer: Layer) -> int:
        if self.is_sharded or self.narrow >= 4:
            return 0
        own = sum(p.inputs * p.outputs for p in self.products(layer)) if self.is_autocast else 0
        adapters = sum(p.rank * (p.inputs + p.outputs) for p in self.products(layer))
        return self.narrow * (own + adapters)

    def gathered(self, *, layers: int, head: bool = False) -> int:
        """FSDP's whole weights: the root's, some layers', and those that are kept."""
        shape, keeps = self.shape, self.config.strategy.reshard_after_forward is False
        size = self.wholes(shape.others) - self.wholes(shape.embedding) - self.wholes(shape.head)
        size += keeps * self.wholes(shape.embedding)
        size += (head or (keeps and self.accumulates)) * self.wholes(shape.head)
        layers = len(shape.layers) if keeps else layers
        return size + layers * self.buffer

    @property
    def buffer(self) -> int:
        """What a layer is gathered into is there until another one is gathered, or to the end."""
        return max(self.wholes(layer.weights) for layer in self.shape.layers)

    def wholes(self, weights: tuple[Weight, ...]) -> int:
        return sum(w.gathered_nbytes(self.narrow) for w in weights) if self.is_sharded else 0

    def gradients_of_layer(self, layer: Layer, *, before: tuple[Weight, ...] = ()) -> int:
        """FSDP's: a layer's gradients as computed, and in fp32 these or those from before it."""
        if not self.is_sharded:
            return 0
        own = _trained(layer.weights)
        return own * self.narrow + max(own, _trained(before)) * self.wide


def _trained(weights: tuple[Weight, ...]) -> int:
    return sum(w.count for w in weights if w.is_trained)
