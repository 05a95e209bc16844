"""Compute the bytes of the tensors that decoder layers save for backward, and of their backward.

The tensors follow from the operations of a layer, from recomputation, and from compilation.
"""

from finetune_trainer.config import TrainConfig
from finetune_trainer.sizing.method import ITEMSIZE
from finetune_trainer.sizing.model_shape import (
    Experts,
    Layer,
    ModelShape,
    Product,
    trained_count,
)

# Tensors of an MLP's width that an activation retains in addition to its input and result.
_RETAINED_BY_ACTIVATION = {"gelu_new": 3, "xielu": 4}


class Activations:
    """Activations of a micro-batch on one rank; every method returns bytes.

    Args:
        shape: Shape of the model with its trained parameters.
        config: Method, strategy and precision.
        tokens: Tokens of a micro-batch.
        keeps_scores: Whether no fused attention kernel supports model and GPU.
    """

    def __init__(
        self, shape: ModelShape, config: TrainConfig, tokens: int, *, keeps_scores: bool
    ) -> None:
        self.shape, self.config, self.tokens = shape, config, tokens
        self.keeps_scores = keeps_scores
        self.item_size = ITEMSIZE[config.training.precision]
        self.sum_size = max(4, self.item_size)
        self.is_sharded = config.strategy.type == "fsdp"
        # FSDP computes in its own low-precision copies; other strategies use autocast.
        self.is_autocast = not self.is_sharded and self.item_size < min(4, shape.head_itemsize)
        self.residual = self.item_size if self.is_sharded else shape.head_itemsize
        self.recompute = config.strategy.activation_checkpointing
        lora = config.method.lora
        self.drops_inputs = lora is not None and lora.dropout > 0

    def saved_by_layers(self) -> int:
        """Return the bytes that all layers save for backward."""
        shape = self.shape
        trained = {index for index, kind in enumerate(shape.kinds) if trained_count(kind.weights)}
        places = (place for place, kind in enumerate(shape.order) if kind in trained)
        first = next(places, len(shape.order))
        return shape.sum_layers(self.saved, 0 if shape.head_trained and shape.is_tied else first)

    def saved(self, layer: Layer) -> int:
        """Return the bytes that a layer saves for backward."""
        if self.recompute == "full":
            return self.tokens * self.shape.hidden * self.residual
        if self.recompute == "selective":
            return self._saved_selective(layer)
        return self._saved_in_full(layer)

    def _saved_selective(self, layer: Layer) -> int:
        """Return the bytes of a layer's input, attention's saved tensors, and product results.

        Compiled layers retain the results of all products, but a layer with one norm, whose
        attention and MLP are parallel, only adds up the last two. Others retain only results of
        frozen weights: they recompute products with a trained weight.
        """
        each = self.shape.hidden * self.residual + 4 * self.shape.heads
        is_compiled = self.config.training.compile
        products = layer.products
        if is_compiled and layer.norms == 1:
            products = (*layer.into_attention, *layer.into_mlp)
        if layer.out_of_attention is not None:
            each += layer.out_of_attention.inputs * self.item_size
            if not is_compiled:  # compiled layers rotate the results of products again
                each += sum(p.outputs for p in layer.into_attention) * self.item_size
        for product in products:
            if is_compiled or not (product.is_trained or product.is_transposed):
                each += product.outputs * self.item_size
        if layer.experts is not None and layer.experts.shared:
            each += (2 * layer.experts.shared + self.shape.hidden) * self.item_size
        return min(self.tokens * each, self._saved_in_full(layer))

    def _saved_in_full(self, layer: Layer) -> int:
        """Return the bytes that autograd saves for a layer without recomputation."""
        if not layer.is_known:
            return self.tokens * self.shape.hidden * self.residual
        if layer.experts is not None:  # compiled ones retain at most as much
            each = self._saved_by_attention(layer) + self._saved_by_experts(layer.experts)
            each += self._saved_by_mlp(layer) if layer.out_of_mlp is not None else 0
            return self.tokens * each + self._merged_experts(layer.experts) + self._scores()
        if self.config.training.compile:
            return self._saved_compiled(layer) + self._scores()
        each = self._saved_by_attention(layer) + self._saved_by_mlp(layer)
        return self.tokens * each + self._scores()

    def _saved_by_attention(self, layer: Layer) -> int:
        """Return the bytes per token of attention and of all norms."""
        attention, size = layer.out_of_attention, self.item_size
        assert attention is not None, "a known layer has attention"
        each = layer.norms * self._norm(self.shape.hidden, is_trained=layer.norms_trained)
        each += sum(self._norm(w, is_trained=layer.norms_trained) for w in layer.other_norms)
        each += self._inputs_of(layer.into_attention)
        each += sum(p.outputs for p in layer.into_attention) * size  # rotated q and k, and v
        each += self._rotated_copies(layer)
        each += sum(self._norm(w, is_trained=layer.norms_trained) for w in layer.head_norms)
        each += attention.inputs * size + 4 * self.shape.heads  # result and its logsumexp
        return each + sum(self._adapter(p) for p in (*layer.into_attention, attention))

    def _rotated_copies(self, layer: Layer) -> int:
        """Return the bytes per token of rotated queries and keys beside their fused product."""
        attention, products = layer.out_of_attention, layer.into_attention
        if attention is None or len(products) != 1 or not self.shape.is_rotary:
            return 0
        return (attention.inputs + products[0].outputs) // 2 * self.item_size

    def _saved_by_mlp(self, layer: Layer) -> int:
        """Return the bytes per token of an MLP."""
        mlp, size = layer.out_of_mlp, self.item_size
        assert mlp is not None, "the layer has an MLP"
        gates = sum(p.outputs for p in layer.into_mlp)
        # the gate's input and result, the other factor, and their product
        each = (gates + 2 * mlp.inputs if gates >= 2 * mlp.inputs else gates + mlp.inputs) * size
        each += _RETAINED_BY_ACTIVATION.get(self.shape.activation, 0) * mlp.inputs * size
        each += self._inputs_of(layer.into_mlp)
        return each + sum(self._adapter(p) for p in (*layer.into_mlp, mlp))

    def _saved_by_experts(self, experts: Experts) -> int:
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

    def _merged_experts(self, experts: Experts) -> int:
        """Return the bytes of peft's copy of all experts of a layer, merged with their adapters."""
        if not experts.is_adapted:
            return 0
        return 3 * experts.count * experts.width * self.shape.hidden * self.item_size

    def _scores(self, nbytes: int | None = None) -> int:
        """Return the bytes of attention scores of a layer, if no fused kernel avoids them."""
        if not (self.keeps_scores and self.shape.score_bytes):
            return 0
        rows = self.config.training.micro_batch_size
        each = self.shape.score_bytes if nbytes is None else nbytes
        return each * self.shape.heads * (self.tokens // rows) ** 2 * rows

    def _saved_compiled(self, layer: Layer) -> int:
        """Return the bytes that compiled code retains.

        These are residuals, inputs of trained products, product results, inputs of head norms, and
        attention. torch's partitioner recomputes other elementwise operations, but no input of a
        product.
        """
        each = layer.norms * self.shape.hidden * self.residual + 4 * self.shape.heads
        each += self._inputs_of(layer.into_attention)
        if layer.norms > 1:  # a single norm feeds both
            each += self._inputs_of(layer.into_mlp)
        each += sum(p.outputs for p in (*layer.into_attention, *layer.into_mlp)) * self.item_size
        each += sum((*layer.head_norms, *layer.other_norms)) * self.item_size
        each += self._rotated_copies(layer)
        if layer.out_of_attention is not None:
            each += layer.out_of_attention.inputs * self.item_size
        if layer.out_of_mlp is not None:
            num_retained = layer.out_of_mlp.keeps_input + (self.shape.activation == "gelu_new")
            each += num_retained * layer.out_of_mlp.inputs * self.item_size
        return self.tokens * (each + sum(self._adapter(p) for p in layer.products))

    def _norm(self, width: int, *, is_trained: bool) -> int:
        """Return an RMSNorm's bytes per token: fp32 input, and the weight's input if trained."""
        wide = max(4, self.residual)
        scaled = wide if self.shape.scales_norms_in_fp32 else self.residual
        return width * (wide + is_trained * scaled) + 4

    def _inputs_of(self, products: tuple[Product, ...]) -> int:
        """Return the bytes of inputs that products retain: under autocast a copy each, else one."""
        saved = [p.inputs for p in products if p.is_trained or (p.rank and not self.drops_inputs)]
        if not saved:
            return 0
        if self.is_autocast and self.residual > self.item_size:
            return sum(saved) * self.item_size
        return saved[0] * self.residual

    def _adapter(self, product: Product) -> int:
        """Return an adapter's bytes per token: inner features, dropped input, and mask."""
        if not product.rank:
            return 0
        dropped = product.inputs * (self.item_size + 1) if self.drops_inputs else 0
        return product.rank * self.item_size + dropped

    def in_backward(self, layer: Layer) -> int:
        """Return the additional bytes of a layer's backward: recomputed values and gradients."""
        mlp = layer.out_of_mlp
        recomputed = self._saved_in_full(layer) if self.recompute != "none" else 0
        hidden = self.tokens * self.shape.hidden * (self.residual + self.item_size)
        gates = 0 if mlp is None else 2 * mlp.inputs * self.item_size * self.tokens
        if layer.experts is not None:
            each = 3 * layer.experts.per_token * layer.experts.width * self.item_size
            # gradients of the larger merged weight
            gates += self.tokens * each + self._merged_experts(layer.experts) * 2 // 3
        return recomputed + hidden + gates + self._scores(4) + self._dequantized(layer)

    def _dequantized(self, layer: Layer) -> int:
        """Return the bytes of the largest 4-bit weight, dequantized."""
        return max(
            (p.inputs * p.outputs * self.item_size for p in layer.products if p.is_quantized),
            default=0,
        )

    def outside_layers(self) -> int:
        """Return the bytes of the last norm and of the positions that enter the head."""
        return self.tokens * (
            self._norm(
                self.shape.hidden, is_trained=self.shape.kinds[self.shape.order[-1]].norms_trained
            )
            + self.shape.hidden * self.residual
        )
