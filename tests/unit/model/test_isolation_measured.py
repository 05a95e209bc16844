"""Before training the wrapped model itself shows what its predictions depend on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel

from finetune_trainer.config import TrainConfig
from finetune_trainer.control import StopSignal
from finetune_trainer.errors import ConfigError
from finetune_trainer.launch.claim import claim_folders
from finetune_trainer.model.float8 import use_float8
from finetune_trainer.model.isolation import NARROW_LIMIT, check_isolation, measure
from finetune_trainer.model.loss import CausalLoss, loss_inputs
from finetune_trainer.rank import run
from finetune_trainer.telemetry import Telemetry
from finetune_trainer.world import World
from support.data.text_fixtures import tiny_tokenizer
from support.launch.launches import train_config
from support.model.every_family import tiny_model, tiny_settings
from support.model.model_families import FAMILIES, family, isolate, pack

CPU = torch.device("cpu")
ALONE = World(rank=0, local_rank=0, world_size=1, device=CPU)


def wrapped(model: Any, dtype: torch.dtype | None = None) -> tuple[CausalLoss, Any]:
    """Return the module, and the forward pass that a strategy would make with it."""
    module = CausalLoss(model)

    def evaluate(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss: torch.Tensor = module(**inputs)
        return loss

    return module, evaluate


def settled(folder: Path, model: Any, said: list[str], **data: Any) -> TrainConfig:
    module, evaluate = wrapped(model)
    config = train_config(folder, data=data)
    return check_isolation(
        config, module, evaluate, device=CPU, any_rank=lambda vote: vote, warn=said.append
    )


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("is_isolating", [True, False], ids=["documents", "model's own mask"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_keeps_documents_apart_stays_far_below_the_limit(
    name: str, is_isolating: bool, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    model = family(name)
    if is_isolating:
        isolate(model, torch.float32)
    found = measure(*wrapped(model, dtype), train_config(tmp_path), CPU)
    assert max(found.neighbours, found.later_tokens) <= 1e-5, "each row is computed alike"
    assert found.alone <= (1e-5 if dtype is None else NARROW_LIMIT / 2)


@pytest.mark.parametrize("name", ["gpt_oss", "falcon", "opt"])
def test_a_family_whose_mask_lacks_positions_gets_a_row_for_each_document(
    name: str, tmp_path: Path
) -> None:
    said: list[str] = []
    config = settled(tmp_path, tiny_model(tiny_settings(name)), said)
    assert not config.data.packing
    assert len(said) == 1
    assert "documents of a pack affect each other" in said[0]
    assert "spec.training.globalBatchSize counts rows" in said[0]


def test_packing_that_is_asked_for_is_refused_where_documents_see_each_other(
    tmp_path: Path,
) -> None:
    model = tiny_model(tiny_settings("gpt_oss"))
    with pytest.raises(ConfigError, match=r"^spec.training.packing true: in GptOssFor.* to false"):
        settled(tmp_path, model, [], is_packing_asked=True)


def test_a_wrapper_that_turns_the_cache_on_is_measured(tmp_path: Path) -> None:
    model = family("llama")
    said: list[str] = []

    def with_cache(body: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "use_cache": True}

    model.model.register_forward_pre_hook(with_cache, with_kwargs=True, prepend=True)
    assert not settled(tmp_path, model, said).data.packing


@pytest.mark.parametrize("packing", [True, False])
def test_a_model_that_sees_what_it_is_to_predict_is_refused(packing: bool, tmp_path: Path) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48}
    both_ways = BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)
    model = BertLMHeadModel(both_ways)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)
    with pytest.raises(ConfigError, match=r"the attention of BertLMHeadModel is not causal"):
        settled(tmp_path, model, [], packing=packing)


@pytest.mark.parametrize(
    ("name", "layers", "influence", "is_packed"),
    [
        pytest.param("mixtral", 94, 0.035, True, id="rounding in many layers of experts"),
        pytest.param("mixtral", 94, 0.06, False, id="as much as a leak"),
        pytest.param("mixtral", 4, 0.035, False, id="few layers of experts"),
        pytest.param("llama", 94, 0.035, False, id="no experts"),
    ],
)
def test_experts_may_round_the_more_the_deeper_the_model_is(
    name: str, layers: int, influence: float, is_packed: bool, tmp_path: Path
) -> None:
    model = tiny_model(tiny_settings(name))
    isolate(model, torch.float32)
    noise = 1e-3

    def round_rows_differently(norm: Any, args: Any) -> Any:
        (states,) = args
        numbers = torch.Generator().manual_seed(0)
        return (states + noise * states.std() * torch.randn(states.shape, generator=numbers),)

    model.model.norm.register_forward_pre_hook(round_rows_differently)
    module, evaluate = wrapped(model, torch.bfloat16)
    config = train_config(tmp_path, training={"precision": "bf16"})
    found = measure(module, evaluate, config, CPU)
    noise *= influence / max(found.neighbours, found.later_tokens)
    model.config.num_hidden_layers = layers
    asked: dict[str, Any] = {"device": CPU, "any_rank": lambda vote: vote, "warn": pytest.fail}
    if not is_packed:
        with pytest.raises((ConfigError, pytest.fail.Exception)):
            check_isolation(config, module, evaluate, **asked)
    else:
        assert check_isolation(config, module, evaluate, **asked).data.packing


def test_measuring_leaves_modes_gradients_and_random_numbers_as_they_were(tmp_path: Path) -> None:
    model = family("gpt2", attn_pdrop=0.1).train()
    model.transformer.wte.eval()
    before = [module.training for module in model.modules()]
    module, evaluate = wrapped(model)
    state = torch.random.get_rng_state()
    found = measure(module, evaluate, train_config(tmp_path), CPU)
    assert found.neighbours <= 1e-5, "dropout is off meanwhile"
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [part.training for part in model.modules()] == before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert module.gives_positions


@pytest.mark.parametrize("is_float8", [False, True], ids=["plain", "float8"])
def test_compiled_layers_are_measured_uncompiled_and_without_float8(
    is_float8: bool, tmp_path: Path
) -> None:
    model = family("llama")
    module, evaluate = wrapped(model, torch.bfloat16)
    if is_float8:
        use_float8(module, CPU, emulate=True)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for layer in model.model.layers:
        layer.compile(backend=backend)
    training = {"compile": True, "float8": is_float8, "precision": "bf16"}
    config = train_config(tmp_path, training=training)
    found = measure(module, evaluate, config, CPU)
    assert max(found.neighbours, found.later_tokens) <= 1e-5
    assert graphs == []
    evaluate(loss_inputs(pack([(9, 7)]), CPU))
    assert graphs, "the layers are compiled for training"


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt_oss")
    tiny_tokenizer(folder)
    settings = tiny_settings("gpt_oss")
    settings.vocab_size = 768
    tiny_model(settings).save_pretrained(folder)
    return folder


def trained(folder: Path, model: Path, **data: Any) -> Telemetry:
    rows = [{"prompt": f"Question {n}?", "completion": f"Answer {n}."} for n in range(6)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = train_config(
        folder,
        world={"nproc_per_node": 1},
        model={"path": str(model)},
        data={"max_seq_len": 64, **data},
        training={"global_batch_size": 2, "max_steps": None, "epochs": 1},
    )
    fence = claim_folders(made, lambda: False)
    telemetry = Telemetry(made, rank=0, world_size=1)
    try:
        run(made, ALONE, StopSignal(), telemetry, fence)
    finally:
        telemetry.close()
    return telemetry


def test_a_run_goes_on_with_a_row_for_each_document_and_says_so(
    tmp_path: Path, gpt_oss: Path
) -> None:
    told = trained(tmp_path, gpt_oss).progress
    assert told.train_data is not None
    assert told.train_data.packs == 6, "one for each row"
    assert told.step == told.total_steps == 3
    assert any("rows are not packed: in GptOssForCausalLM" in said for said in told.warnings)


def test_a_run_that_asks_for_packing_ends_before_its_first_step(
    tmp_path: Path, gpt_oss: Path
) -> None:
    with pytest.raises(ConfigError, match=r"^spec.training.packing true: in GptOssForCausalLM"):
        trained(tmp_path, gpt_oss, is_packing_asked=True)
