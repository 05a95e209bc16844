"""Compute the peak memory of a step on one rank, by component; no device is needed.

Only a few moments of a step can be the peak: the head, its gradient, the backward pass of the last
and of the first layer, the embedding's gradient, and the optimizer; under FSDP also the gathering
of embedding and head. The live tensors follow from the tensors that autograd saves, from sharding,
and from recomputation. `test_memory_peak.py` compares with a trace.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from finetune_trainer.config import TrainConfig
from finetune_trainer.sizing.method import ITEMSIZE
from finetune_trainer.sizing.model_shape import Experts, Layer, ModelShape, Product, Weight
from finetune_trainer.sizing.moments import moment_nbytes
from finetune_trainer.sizing.zero import MOST_IN_BUCKET, engine_state, stage_of

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
# Tensors of an MLP's width that an activation retains in addition to its input and result.
_RETAINED_BY_ACTIVATION = {"gelu_new": 3, "xielu": 4}
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
        self.keeps_scores = keeps_scores
        strategy, training = config.strategy, config.training
        self.item_size = ITEMSIZE[training.precision]
        self.sum_size = max(4, self.item_size)
        self.is_sharded = strategy.type == "fsdp"
        self.zero_stage = stage_of(config)
        self.shards = config.world.world_size // strategy.replicas if self.is_sharded else 1
        # FSDP computes in its own low-precision copies; other strategies use autocast.
        self.is_autocast = not self.is_sharded and self.item_size < min(4, shape.head_itemsize)
        self.residual = self.item_size if self.is_sharded else shape.head_itemsize
        self.optimizer = training.optimizer
        self.recompute = strategy.activation_checkpointing
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
                "head is gathered": self.at_gathering(shape.head, self.saved_by_layers()),
                "head's gradient": self.at_head_gradient(),
            }
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
        trained = self.shape.sum_weights(lambda w: w.is_trained * w.count)
        ranks = self.config.world.world_size
        if self.zero_stage == 1:
            return self.item_size * trained
        bucket = self.sum_size * min(trained, MOST_IN_BUCKET)
        return self.sum_size * trained // ranks + bucket if self.zero_stage == 2 else 0

    def whole_gradients(self) -> int:
        """Sum FSDP's unsharded fp32 gradients over micro-batches, if the strategy retains them."""
        keeps = self.config.strategy.reduce_each_micro_batch is False
        if not (self.is_sharded and keeps and self.accumulates):
            return 0
        return self.shape.sum_weights(lambda w: w.is_trained * w.count) * self.sum_size

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
            "activations": self.saved_by_layers() + self.outside_layers(),
            "logits": self.head(self.tokens, self.shape.hidden),
        }

    def at_head_gradient(self) -> dict[str, int]:
        """Return the parts while FSDP reduces the head's gradient, before any layer's backward."""
        whole = _trained(self.shape.head) * (self.item_size + self.sum_size)
        return {
            **self.static(),
            **self.earlier_gradients(),
            "gathered layers": self.gathered(layers=1) + whole,
            "activations": self.saved_by_layers(),
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
            "activations": self.saved_by_layers() + self.in_backward(layer),
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
            "activations": self.saved(layer) + self.in_backward(layer),
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

    def at_optimizer(self) -> dict[str, int]:
        parts = {**self.static(), "gradients": self.gradients()}
        if self.optimizer == "adamw8bit":  # an uncompiled update; a compiled one needs less
            largest = self.shape.largest_weight(lambda w: w.is_trained * -(-w.count // self.shards))
            parts["moments"] += UPDATE_BYTES * min(largest, ELEMENTS_PER_PASS)
        return parts

    # ---- activations

    def saved_by_layers(self) -> int:
        shape = self.shape
        trained = {index for index, kind in enumerate(shape.kinds) if _trained(kind.weights)}
        places = (place for place, kind in enumerate(shape.order) if kind in trained)
        first = next(places, len(shape.order))
        return shape.sum_layers(self.saved, 0 if shape.head_trained and shape.is_tied else first)

    def saved(self, layer: Layer) -> int:
        """Return the bytes that a layer saves for backward."""
        if self.recompute == "full":
            return self.tokens * self.shape.hidden * self.residual
        if self.recompute == "selective":
            return self.saved_selective(layer)
        return self.saved_in_full(layer)

    def saved_selective(self, layer: Layer) -> int:
        """Return the bytes of a layer's input, attention's saved tensors, and product results.

        Compiled layers retain the results of all products, others only of frozen weights: they
        recompute products with a trained weight.
        """
        each = self.shape.hidden * self.residual + 4 * self.shape.heads
        is_compiled = self.config.training.compile
        if layer.out_of_attention is not None:
            each += layer.out_of_attention.inputs * self.item_size
            if not is_compiled:  # compiled layers rotate the results of products again
                each += sum(p.outputs for p in layer.into_attention) * self.item_size
        for product in self.products(layer):
            if is_compiled or not (product.is_trained or product.is_transposed):
                each += product.outputs * self.item_size
        if layer.experts is not None and layer.experts.shared:
            each += (2 * layer.experts.shared + self.shape.hidden) * self.item_size
        return min(self.tokens * each, self.saved_in_full(layer))

    def saved_in_full(self, layer: Layer) -> int:
        """Return the bytes that autograd saves for a layer without recomputation."""
        if not layer.is_known:
            return self.tokens * self.shape.hidden * self.residual
        if layer.experts is not None:  # compiled ones retain at most as much
            each = self.saved_by_attention(layer) + self.saved_by_experts(layer.experts)
            each += self.saved_by_mlp(layer) if layer.out_of_mlp is not None else 0
            return self.tokens * each + self.merged_experts(layer.experts) + self.scores()
        if self.config.training.compile:
            return self.saved_compiled(layer) + self.scores()
        each = self.saved_by_attention(layer) + self.saved_by_mlp(layer)
        return self.tokens * each + self.scores()

    def saved_by_attention(self, layer: Layer) -> int:
        """Return the bytes per token of attention and of all norms."""
        attention, size = layer.out_of_attention, self.item_size
        assert attention is not None, "a known layer has attention"
        each = layer.norms * self.norm(self.shape.hidden, is_trained=layer.norms_trained)
        each += sum(self.norm(w, is_trained=layer.norms_trained) for w in layer.other_norms)
        each += self.inputs_of(layer.into_attention)
        each += sum(p.outputs for p in layer.into_attention) * size  # rotated q and k, and v
        each += self.rotated_copies(layer)
        each += sum(self.norm(w, is_trained=layer.norms_trained) for w in layer.head_norms)
        each += attention.inputs * size + 4 * self.shape.heads  # result and its logsumexp
        return each + sum(self.adapter(p) for p in (*layer.into_attention, attention))

    def rotated_copies(self, layer: Layer) -> int:
        """Return the bytes per token of rotated queries and keys beside their fused product."""
        attention, products = layer.out_of_attention, layer.into_attention
        if attention is None or len(products) != 1 or not self.shape.is_rotary:
            return 0
        return (attention.inputs + products[0].outputs) // 2 * self.item_size

    def saved_by_mlp(self, layer: Layer) -> int:
        """Return the bytes per token of an MLP."""
        mlp, size = layer.out_of_mlp, self.item_size
        assert mlp is not None, "the layer has an MLP"
        gates = sum(p.outputs for p in layer.into_mlp)
        # the gate's input and result, the other factor, and their product
        each = (gates + 2 * mlp.inputs if gates >= 2 * mlp.inputs else gates + mlp.inputs) * size
        each += _RETAINED_BY_ACTIVATION.get(self.shape.activation, 0) * mlp.inputs * size
        each += self.inputs_of(layer.into_mlp)
        return each + sum(self.adapter(p) for p in (*layer.into_mlp, mlp))

    def saved_by_experts(self, experts: Experts) -> int:
        """Return the bytes per token of routed and shared experts.

        Each routed expert retains the gate's input and result and the other factor, and unless it
        is frozen also its copy of the input, the product and its output.
        """
        hidden, width, size = self.shape.hidden, experts.width, self.item_size
        if experts.is_trained and not self.is_sharded:
            size = self.sum_size  # torch's grouped product does not use autocast
        is_frozen = not (experts.is_adapted or experts.is_trained)
        routed = 3 * width if is_frozen else 2 * hidden + 4 * width
        each = experts.per_token * routed * size + 2 * hidden * size
        return each + bool(experts.shared) * (4 * experts.shared + hidden) * size

    def merged_experts(self, experts: Experts) -> int:
        """Return the bytes of peft's copy of all experts of a layer, merged with their adapters."""
        if not experts.is_adapted:
            return 0
        return 3 * experts.count * experts.width * self.shape.hidden * self.item_size

    def scores(self, nbytes: int | None = None) -> int:
        """Return the bytes of attention scores of a layer, if no fused kernel avoids them."""
        if not (self.keeps_scores and self.shape.score_bytes):
            return 0
        rows = self.config.training.micro_batch_size
        each = self.shape.score_bytes if nbytes is None else nbytes
        return each * self.shape.heads * (self.tokens // rows) ** 2 * rows

    def saved_compiled(self, layer: Layer) -> int:
        """Return the bytes that compiled code retains.

        These are residuals, inputs of trained products, product results, inputs of head norms, and
        attention. torch's partitioner recomputes other elementwise operations, but no input of a
        product.
        """
        each = layer.norms * self.shape.hidden * self.residual + 4 * self.shape.heads
        each += self.inputs_of(layer.into_attention) + self.inputs_of(layer.into_mlp)
        each += sum(p.outputs for p in (*layer.into_attention, *layer.into_mlp)) * self.item_size
        each += sum((*layer.head_norms, *layer.other_norms)) * self.item_size
        each += self.rotated_copies(layer)
        if layer.out_of_attention is not None:
            each += layer.out_of_attention.inputs * self.item_size
        if layer.out_of_mlp is not None and layer.out_of_mlp.keeps_input:
            each += layer.out_of_mlp.inputs * self.item_size
        return self.tokens * (each + sum(self.adapter(p) for p in self.products(layer)))

    def norm(self, width: int, *, is_trained: bool) -> int:
        """Return an RMSNorm's bytes per token: fp32 input, and the weight's input if trained."""
        wide = max(4, self.residual)
        scaled = wide if self.shape.scales_norms_in_fp32 else self.residual
        return width * (wide + is_trained * scaled) + 4

    def inputs_of(self, products: tuple[Product, ...]) -> int:
        """Return the bytes of inputs that products retain: under autocast a copy each, else one."""
        saved = [p.inputs for p in products if p.keeps_input]
        if not saved:
            return 0
        if self.is_autocast and self.residual > self.item_size:
            return sum(saved) * self.item_size
        return saved[0] * self.residual

    def adapter(self, product: Product) -> int:
        return product.rank * self.item_size

    def products(self, layer: Layer) -> tuple[Product, ...]:
        ends = tuple(p for p in (layer.out_of_attention, layer.out_of_mlp) if p is not None)
        return (*layer.into_attention, *layer.into_mlp, *ends)

    def in_backward(self, layer: Layer) -> int:
        """Return the additional bytes of a layer's backward: recomputed values and gradients."""
        mlp = layer.out_of_mlp
        recomputed = self.saved_in_full(layer) if self.recompute != "none" else 0
        hidden = self.tokens * self.shape.hidden * (self.residual + self.item_size)
        gates = 0 if mlp is None else 2 * mlp.inputs * self.item_size * self.tokens
        if layer.experts is not None:
            each = 3 * layer.experts.per_token * layer.experts.width * self.item_size
            # gradients of the larger merged weight
            gates += self.tokens * each + self.merged_experts(layer.experts) * 2 // 3
        return recomputed + hidden + gates + self.scores(4) + self.dequantized(layer)

    def dequantized(self, layer: Layer) -> int:
        """Return the bytes of the largest 4-bit weight, dequantized."""
        return max(
            (p.inputs * p.outputs * self.item_size for p in self.products(layer) if p.is_quantized),
            default=0,
        )

    def outside_layers(self) -> int:
        """Return the bytes of the last norm and of the positions that enter the head."""
        return self.tokens * (
            self.norm(
                self.shape.hidden, is_trained=self.shape.kinds[self.shape.order[-1]].norms_trained
            )
            + self.shape.hidden * self.residual
        )

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
        own = sum(p.inputs * p.outputs for p in self.products(layer)) if self.is_autocast else 0
        adapters = sum(p.rank * (p.inputs + p.outputs) for p in self.products(layer))
        return self.item_size * (own + adapters)

    def gathered(self, *, layers: int, head: bool = False) -> int:
        """Return the bytes of weights gathered by FSDP: root, some layers, and retained groups."""
        if self.zero_stage == 3:  # at least two layers, and embedding or head
            ends = self.shape.vocabulary * self.shape.hidden * self.item_size
            return 2 * self.buffer + ends
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
        gathers = self.is_sharded or self.zero_stage == 3
        return sum(w.gathered_nbytes(self.item_size) for w in weights) if gathers else 0

    def gradients_of_layer(self, layer: Layer, *, before: tuple[Weight, ...] = ()) -> int:
        """Return the bytes of FSDP's gradients of a layer, and of its or `before`'s in fp32.

        The gathering buffer is released before the gradients are complete.
        """
        if not self.is_sharded:
            return 0
        own = _trained(layer.weights)
        gradients = own * self.item_size + max(own, _trained(before)) * self.sum_size
        return max(self.buffer, gradients)


def _trained(weights: tuple[Weight, ...]) -> int:
    return sum(w.count for w in weights if w.is_trained)
