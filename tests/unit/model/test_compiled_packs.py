"""Compiled layers: packs of any number of documents share their graphs, which never break.

Attention of packs runs through torch's own operator as on a GPU, with the CPU kernels that
`compile_layers` registers; Gemma 2 runs through flex, whose check of the device is lifted.
"""

import random
from itertools import pairwise, product

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._dynamo.utils import counters
from torch.nn.attention.varlen import varlen_attn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from finetune_trainer.answers import answer
from finetune_trainer.export.merge import probe_logits
from finetune_trainer.model import attention, cpu_varlen
from finetune_trainer.model.attention import NAME, _attend_at_once, _attend_each
from finetune_trainer.model.compile import compile_layers
from finetune_trainer.model.kernels import use_flex
from finetune_trainer.model.loss import CausalLoss, base_of, loss_inputs
from finetune_trainer.model.quantize import (
    insert_unquantized_4bit_layers,
    move,
    use_pure_products,
)
from finetune_trainer.model.recompute import recompute
from support.data.text_fixtures import tiny_model
from support.model import grids
from support.model.model_families import CPU, family, isolate, lift_flex_check, pack

WIDTH = 128
WARM_UP, PACKS, MOST_DOCUMENTS = 3, 50, 30

# Dynamo looks at .grad of every tensor that it meets, and torch warns it.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
    # Dynamo does so when it traces the product of bitsandbytes.
    pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning"),
]

FAMILIES = (
    "llama",
    "mistral with a window",
    "qwen2 with windows",
    "qwen3",
    "gemma2",
    "gemma3",
)
IN_EACH_RUN = [("mistral with a window", "lora", "selective"), ("gemma2", "full", "none")]
GRID = list(product(FAMILIES, ("lora", "full", "nf4"), ("none", "selective", "full")))


def documents(numbers, count):
    """Cut a pack of the width into as many documents."""
    cuts = sorted(numbers.sample(range(1, WIDTH), count - 1))
    return [end - start for start, end in pairwise([0, *cuts, WIDTH])]


def quantised(model):
    """Return the model with 4-bit layers, as loading with QLoRA does."""
    kinds = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    settings = BitsAndBytesConfig(**kinds, bnb_4bit_compute_dtype=torch.bfloat16)
    insert_unquantized_4bit_layers(model, settings)
    move(model, CPU)
    use_pure_products(model)
    return model


def module_of(name, method, how):
    model = family(name, max_position_embeddings=WIDTH)
    if name == "gemma2":
        use_flex(model)
    else:
        assert isolate(model)
    if method == "nf4":
        model = quantised(model)
    if method != "full":
        lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
        model = get_peft_model(model, lora)
    recompute(base_of(model), how)
    return CausalLoss(model).train()


def one_step(module, lengths):
    """Make one forward and backward pass under autocast; return loss and gradients."""
    module.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = module(**loss_inputs(pack([lengths], width=WIDTH), CPU))
    loss.backward()
    return loss.item(), torch.cat(
        [p.grad.flatten() for p in module.parameters() if p.grad is not None]
    )


@pytest.mark.full
@pytest.mark.parametrize(("name", "method", "how"), GRID if grids.IS_WHOLE else IN_EACH_RUN)
def test_fifty_packs_break_no_graph_and_recompile_none(name, method, how, monkeypatch):
    lift_flex_check(monkeypatch)
    torch._dynamo.reset()
    counters.clear()
    numbers = random.Random(0)
    eager, module = module_of(name, method, how), module_of(name, method, how)
    compile_layers(base_of(module.model), CPU, is_asked=True, warn=pytest.fail, backend="aot_eager")
    for count in (1, MOST_DOCUMENTS, 7)[:WARM_UP]:
        one_step(module, documents(numbers, count))
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    for _ in range(PACKS - 1):
        one_step(module, documents(numbers, numbers.randint(1, MOST_DOCUMENTS)))
    last = documents(numbers, 11)
    loss, gradient = one_step(module, last)
    assert counters["stats"]["unique_graphs"] == graphs
    assert dict(counters["graph_break"]) == {}
    wanted, expected = one_step(eager, last)
    assert loss == pytest.approx(wanted, rel=2e-2)
    assert (gradient - expected).norm() / expected.norm() < 5e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("window", [0, 4])
def test_the_cpu_kernel_of_packed_documents_is_torch_s_attention_of_each(window, dtype):
    cpu_varlen.register()
    torch.manual_seed(0)
    rows = [torch.randn(40, heads, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]
    bounds = torch.tensor([0, 9, 11, 12, 40], dtype=torch.int32)
    slope = torch.randn(40, 4, 8, dtype=dtype)
    found = _attend_at_once(rows, bounds, 28, window, 0.3)
    expected = _attend_each(rows, bounds, window, 0.0, 0.3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    made, wanted = (torch.autograd.grad(one, rows, slope) for one in (found, expected))
    torch.testing.assert_close(made, wanted, rtol=0, atol=1e-5)


def test_a_torch_whose_operator_knows_no_shared_heads_gets_a_copy_of_them(monkeypatch):
    """So it is with torch 2.11."""
    cpu_varlen.register()
    torch.manual_seed(0)
    rows = [torch.randn(40, heads, 8) for heads in (4, 2, 2)]
    bounds = torch.tensor([0, 9, 40], dtype=torch.int32)
    expected = _attend_at_once(rows, bounds, 31, 4, None)
    seen = []

    def of_2_11(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size):
        seen.append(key.shape[1])
        return varlen_attn(
            query, key, value, cu_q, cu_k, max_q, max_k, scale=scale, window_size=window_size
        )

    monkeypatch.setattr(attention, "varlen_attn", of_2_11)
    monkeypatch.setattr(attention, "_VARLEN_GROUPS_HEADS", False)
    torch.testing.assert_close(_attend_at_once(rows, bounds, 31, 4, None), expected)
    assert seen == [4]


def test_without_dynamic_bounds_packs_would_be_compiled_again(monkeypatch):
    """The counter sees what the test above says does not happen."""
    monkeypatch.setattr("finetune_trainer.model.compile.dynamic_dimensions", lambda mask: ())
    torch._dynamo.reset()
    counters.clear()
    module = module_of("llama", "full", "none")
    assert base_of(module.model).config._attn_implementation == NAME
    compile_layers(base_of(module.model), CPU, is_asked=True, warn=pytest.fail, backend="aot_eager")
    one_step(module, [64, 64])
    graphs = counters["stats"]["unique_graphs"]
    one_step(module, [40, 40, 48])
    assert counters["stats"]["unique_graphs"] > graphs


class Sizes:
    """A backend that notes of each graph whether sizes of its numbers are symbols."""

    def __init__(self):
        self.are_symbols = []

    def __call__(self, graph, inputs):
        given = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        tensors = [one for one in given if isinstance(one, torch.Tensor)]
        sizes = [size for one in tensors if one.is_floating_point() for size in one.shape]
        self.are_symbols.append(any(isinstance(size, torch.SymInt) for size in sizes))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def evaluated(module, rows, length):
    batch = pack([(length,)] * rows, width=length)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        module(**loss_inputs(batch, CPU))


@pytest.mark.full
def test_lengths_of_evaluation_share_graphs_and_leave_those_of_training_to_one_length():
    torch._dynamo.reset()
    counters.clear()
    module, sizes = module_of("llama", "lora", "none"), Sizes()
    compile_layers(base_of(module.model), CPU, is_asked=True, warn=pytest.fail, backend=sizes)
    for rows, length in ((1, 120), (2, 60), (3, 33)):
        evaluated(module, rows, length)
    assert any(sizes.are_symbols)
    before = len(sizes.are_symbols)
    for rows, length in ((4, 28), (8, 15), (16, 8), (30, 4)):
        evaluated(module, rows, length)
    assert len(sizes.are_symbols) == before
    one_step(module, [64, 64])
    one_step(module, [40, 40, 48])
    assert not any(sizes.are_symbols[before:])
    trained = len(sizes.are_symbols)
    assert trained > before
    evaluated(module, 5, 22)
    one_step(module, [128])
    assert len(sizes.are_symbols) == trained


def test_rows_of_any_length_that_are_trained_share_graphs():
    torch._dynamo.reset()
    counters.clear()
    module, sizes = module_of("llama", "full", "none"), Sizes()
    compile_layers(base_of(module.model), CPU, is_asked=True, warn=pytest.fail, backend=sizes)
    made = []
    for length in (128, 100, 90, 71, 64, 33):
        module(**loss_inputs(pack([(length,)], width=length), CPU)).backward()
        made.append(len(sizes.are_symbols))
    assert made[2:] == [made[2]] * 4


@pytest.mark.full
def test_a_layer_of_several_graphs_causes_one_warning():
    torch._dynamo.reset()
    module = module_of("llama", "lora", "none")
    warnings: list[str] = []
    for layer in base_of(module.model).model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: torch._dynamo.graph_break())
    compile_layers(
        base_of(module.model), CPU, is_asked=True, warn=warnings.append, backend="aot_eager"
    )
    one_step(module, [64, 64])
    one_step(module, [40, 40, 48])
    (warning,) = warnings
    assert warning.startswith("layers of LlamaForCausalLM do not compile in one graph, so steps ")


def test_answers_and_the_probe_of_an_export_compile_no_graph(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    torch._dynamo.reset()
    compile_layers(model, CPU, is_asked=True, warn=pytest.fail, backend="aot_eager")
    counters.clear()
    assert answer(model, tokenizer, "Hello")
    probe_logits(model)
    assert counters["stats"]["unique_graphs"] == 0
    with torch.no_grad():
        model(input_ids=torch.arange(9)[None], use_cache=False)
    assert counters["stats"]["unique_graphs"] > 0
