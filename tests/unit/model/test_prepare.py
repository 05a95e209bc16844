"""What a model is prepared with besides attention: compiled layers, liger, float8."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from finetune_trainer.errors import ConfigError
from finetune_trainer.model.compile import compile_layers
from finetune_trainer.model.float8 import check_float8, undo_float8, use_float8
from finetune_trainer.model.layers import decoder_layers
from finetune_trainer.model.loss import CausalLoss, loss_inputs
from finetune_trainer.model.prepare import prepare_model
from support.launch.launches import train_config
from support.model.model_families import family, gradients, pack

CPU = torch.device("cpu")
BATCH = pack([(9, 7, 5)], width=24)


def one_step(model, batch=BATCH):
    module = CausalLoss(model)
    module.zero_grad()
    loss = module(**loss_inputs(batch, CPU))
    loss.backward()
    return loss.detach(), gradients(module)


# Dynamo looks at .grad of every tensor that it meets, and torch warns it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers_give_the_same_gradients_and_packs_share_one_graph():
    from torch._dynamo.testing import CompileCounterWithBackend

    expected = one_step(family("llama"))
    model, counter = family("llama", num_hidden_layers=4), CompileCounterWithBackend("aot_eager")
    compile_layers(model, CPU, is_asked=True, warn=pytest.fail, backend=counter)
    for packs in ([(9, 7, 5)], [(4, 4, 4, 4)], [(20,)], [(3, 3, 9)]):
        one_step(model, pack(packs, width=24))
    assert counter.frame_count <= 2  # one kind of layer, whatever the documents
    model = family("llama")
    compile_layers(model, CPU, is_asked=True, warn=pytest.fail, backend="aot_eager")
    torch.testing.assert_close(one_step(model), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_decoder_layers_are_found_in_any_family_and_under_adapters(name):
    model = family(name)
    assert len(decoder_layers(model)) == 2
    assert set(decoder_layers(model)) < set(model.get_decoder().modules())  # no vision tower
    targets = ["c_attn"] if name == "gpt2" else ["q_proj"]
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=targets, fan_in_fan_out=name == "gpt2")
    assert len(decoder_layers(get_peft_model(model, lora).get_base_model())) == 2


def broken(graph, inputs):
    raise RuntimeError("no such kernel")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_model_that_cannot_be_compiled_is_refused_where_the_manifest_asks_for_it():
    fault = r"^spec.training.compile: the decoder layers of Linear cannot be found; set it to false"
    with pytest.raises(ConfigError, match=fault):
        compile_layers(torch.nn.Linear(2, 2), CPU, is_asked=True, warn=pytest.fail)
    model = family("llama")
    compile_layers(model, CPU, is_asked=True, warn=pytest.fail, backend=broken)
    with pytest.raises(
        ConfigError, match=r"^spec.training.compile: layers of Llama.*no such kernel"
    ):
        one_step(model)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_memory_that_ends_while_layers_are_compiled_is_no_fault_of_the_model():
    def full(graph, inputs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = family("llama")
    compile_layers(model, CPU, is_asked=False, warn=pytest.fail, backend=full)
    with pytest.raises(torch.OutOfMemoryError):
        one_step(model)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_model_that_cannot_be_compiled_goes_on_without_where_it_is_the_default():
    said: list[str] = []
    expected = one_step(family("llama"))
    compile_layers(torch.nn.Linear(2, 2), CPU, is_asked=False, warn=said.append)
    model = family("llama")
    compile_layers(model, CPU, is_asked=False, warn=said.append, backend=broken)
    torch.testing.assert_close(one_step(model), expected, rtol=0, atol=0)
    assert len(said) == 2
    assert all(one.startswith("training continues without compiled layers: ") for one in said)
    assert "no such kernel" in said[1]


def without_a_backward_kernel():
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func

    def forward(graph, inputs):
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=forward, bw_compiler=broken, inference_compiler=forward)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("documents", [[(24,)], [(9, 7, 5)]])
def test_a_backward_pass_that_cannot_be_compiled_is_seen_in_the_forward_pass(documents):
    said: list[str] = []
    batch = pack(documents, width=24)
    expected = one_step(family("llama"), batch)
    model = family("llama")
    torch._dynamo.reset()
    backend = without_a_backward_kernel()
    compile_layers(model, CPU, is_asked=False, warn=said.append, backend=backend)
    torch.testing.assert_close(one_step(model, batch), expected, rtol=0, atol=0)
    assert len(said) == 1
    assert "no such kernel" in said[0]
    model = family("llama")
    torch._dynamo.reset()
    compile_layers(model, CPU, is_asked=True, warn=pytest.fail, backend=backend)
    with pytest.raises(ConfigError, match=r"^spec.training.compile: .*no such kernel"):
        one_step(model, batch)


@pytest.mark.parametrize(
    ("training", "said"),
    [
        pytest.param({"liger": True}, r"^spec.training.liger needs a GPU", id="liger"),
        pytest.param({"float8": True}, r"^spec.training.float8 needs a GPU", id="float8"),
    ],
)
def test_what_needs_a_gpu_is_refused_on_a_cpu(training, said, tmp_path):
    config = train_config(tmp_path, training=training)
    with pytest.raises(ConfigError, match=said):
        prepare_model(family("llama"), config, CPU)


def test_float8_is_refused_for_adapters(tmp_path):
    config = train_config(
        tmp_path,
        training={"float8": True},
        method={"type": "lora", "lora": {}},
        output={"format": "adapter"},
    )
    with pytest.raises(ConfigError, match=r"^spec.training.float8 needs spec.method.type full"):
        prepare_model(family("llama"), config, CPU)


def test_float8_replaces_the_linear_layers_of_decoder_layers_alone():
    from torchao.float8.float8_linear import Float8Linear

    module = CausalLoss(family("llama", hidden_size=64, seed=3))
    names = [n for n, m in module.named_modules() if type(m) is torch.nn.Linear]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.div_(8)  # back to weights as models have them
    use_float8(module, CPU, emulate=True)
    check_float8(module, evaluate(module), loss_inputs(BATCH, CPU))
    replaced = [n for n, m in module.named_modules() if isinstance(m, Float8Linear)]
    assert replaced == names
    assert len(replaced) == 14
    rounded = evaluate(module)(loss_inputs(BATCH, CPU))
    undo_float8(module)
    assert [n for n, m in module.named_modules() if type(m) is torch.nn.Linear] == names
    assert evaluate(module)(loss_inputs(BATCH, CPU)) != rounded


def evaluate(module):
    def loss(inputs):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            return module(**inputs)

    return loss


def test_float8_that_changes_the_loss_is_refused_with_how_much():
    module = CausalLoss(family("llama", hidden_size=64, seed=3))
    use_float8(module, CPU, emulate=True)
    with pytest.raises(
        ConfigError, match=r"^spec.training.float8 changes the first batch's loss by [\d.]+%, more"
    ):
        check_float8(module, evaluate(module), loss_inputs(BATCH, CPU))
    assert not any("forward" in vars(part) for part in module.modules()), "float8 is back"


def test_adapters_take_inputs_as_they_are_only_where_autocast_narrows_them(tmp_path):
    for precision, is_widened in (("bf16", False), ("fp32", True)):
        config = train_config(tmp_path, training={"precision": precision})
        lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
        model = get_peft_model(family("llama"), lora)
        prepare_model(model, config, CPU)
        layer = model.get_base_model().model.layers[0].self_attn.q_proj
        assert layer.cast_input_dtype_enabled == is_widened


# What torch imports for its own compiler is deprecated by torch.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_documents_attention_serves_compiled_layers_on_a_cpu(tmp_path):
    config = train_config(tmp_path, training={"compile": True})
    model = family("llama")
    prepare_model(model, config, CPU)
    assert model.config._attn_implementation == "documents"


def test_a_run_s_model_gets_the_attention_that_its_configuration_names(tmp_path):
    model = family("llama")
    own = model.config._attn_implementation
    config = train_config(tmp_path, training={"attention": "model"})
    prepare_model(model, config, CPU)
    assert model.config._attn_implementation == own
    config = train_config(tmp_path, training={"attention": "flex"})
    with pytest.raises(ConfigError, match=r"^spec.training.attention flex does not support Llama"):
        prepare_model(model, config, CPU)
