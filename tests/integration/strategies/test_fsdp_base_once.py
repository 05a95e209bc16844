"""Under FSDP no rank's device holds the whole base, also in 4 bits or with float8 products."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from finetune_trainer.config import ExitCode, TrainConfig
from finetune_trainer.model.adapters import choose_trained
from finetune_trainer.model.compile import compile_layers
from finetune_trainer.model.float8 import check_float8, use_float8
from finetune_trainer.model.load import load_device, load_model
from finetune_trainer.model.loss import CausalLoss
from finetune_trainer.sizing.method import is_loaded_once
from finetune_trainer.strategies import create, parallelize
from support.checkpoint.checkpoint_fixtures import run_processes
from support.launch.forked_ranks import attempt, numbers
from support.launch.launches import train_config
from support.launch.tiny_run import write_inputs
from support.strategies.alive import Alive, deep_model
from support.strategies.parity import Case, inputs_of, world_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NF4 = {"type": "qlora", "quantization": "nf4", "lora": {"r": 4}}


@contextmanager
def copies_of_cuda() -> Iterator[list[int]]:
    """Let `torch._foreach_copy_` rewrite NaNs of 16-bit floats like its CUDA kernel.

    The kernel converts each element to fp32 and back, and a NaN becomes 0x7FFF
    (aten/src/ATen/native/cuda/ForeachBinaryOpList.cu). Yields the number of rewritten elements.
    """
    copy, rewritten = torch._foreach_copy_, [0]

    def as_on_cuda(targets, sources, *args):
        copy(targets, sources, *args)
        for target in targets:
            if target.dtype in (torch.bfloat16, torch.float16):
                is_nan = target.isnan()
                rewritten[0] += int(is_nan.sum())
                target.view(torch.int16)[is_nan] = 0x7FFF

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", as_on_cuda)
        yield rewritten


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def adapted(base: Any, config: TrainConfig) -> CausalLoss:
    """Return the base with adapters that change something, or with float8, the same each time."""
    torch.manual_seed(0)
    module = CausalLoss(choose_trained(base, config))
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    if config.training.float8:
        use_float8(module, torch.device("cpu"), emulate=True)
    return module


def load_and_shard(group: "ProcessGroup", folder: Path, config: TrainConfig) -> None:
    """Do as `rank` does; tell loading, which rank 0 does in its host's memory, from sharding."""

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("scales are not pickled")

    torch.distributed.broadcast_object_list = refuse
    world = world_of(group)
    place = load_device(config, world.rank, world.device)
    strategy = create(config, world)
    loading, sharding = Alive(), Alive()
    with loading:
        base = load_model(config, place, quantises=not is_loaded_once(config))
        module = adapted(base, config)
    del base
    with sharding:
        strategy.prepare(module)
    inputs = inputs_of(Case("", {}), 0)
    if config.training.float8:
        check_float8(module, strategy.evaluate, inputs)
    whole_model = strategy.whole_model()
    if whole_model is not None:
        assert not any("Float8" in type(part).__name__ for part in whole_model.modules())
    found = [(p.numel() * p.element_size(), local_bytes(p)) for p in module.parameters()]
    loss = strategy.evaluate(inputs).item()
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # the next evaluation gathers the weights again
    with copies_of_cuda() as rewritten:
        loss_on_cuda = strategy.evaluate(inputs).item()
    wholes, parts = zip(*found, strict=True)
    result = {
        "loading": loading.most,
        "sharding": sharding.most,
        "whole": sum(wholes),
        "part": sum(parts),
        "largest": max(wholes),
        "loss": loss,
        "loss with CUDA's copies": loss_on_cuda,
        "NaNs": rewritten[0],
    }
    torch.save(result, folder / f"{world.rank}.pt")


def local_bytes(parameter: torch.Tensor) -> int:
    assert isinstance(parameter, DTensor)
    part = parameter.to_local()
    return part.numel() * part.element_size()


FLOAT8 = {"precision": "bf16", "float8": True}


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "training"),
    [
        pytest.param(NF4, {"precision": "fp32"}, id="nf4"),
        pytest.param(NF4, {"precision": "bf16"}, id="nf4 in bf16", marks=pytest.mark.full),
        pytest.param({"type": "full"}, FLOAT8, id="float8", marks=pytest.mark.full),
    ],
)
def test_a_rank_holds_its_part_and_a_few_weights_at_most(
    tmp_path: Path, method: dict[str, Any], training: dict[str, Any]
) -> None:
    config = train_config(
        tmp_path,
        model={"path": str(deep_model(tmp_path / "model"))},
        strategy={"type": "fsdp"},
        method=method,
        training=training,
        output={"format": "merged" if method["type"] == "full" else "adapter"},
    )
    assert run_processes(load_and_shard, tmp_path, config, world_size=2) == [0, 0]
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert ranks[1]["loading"] <= 2 * ranks[1]["largest"]
    for rank in ranks:
        # Besides: what is being quantised and sent, and the scales.
        scales = rank["whole"] / 32
        assert rank["sharding"] <= rank["part"] + scales + 4 * rank["largest"]
        assert rank["sharding"] <= 0.75 * rank["whole"]

    module = adapted(load_model(config, torch.device("cpu")), config)  # quantised as it is read
    is_narrow = training["precision"] == "bf16"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_narrow):
        expected = module(**inputs_of(Case("", {}), 0)).item()
    tolerance = 2e-3 if is_narrow else 1e-6
    assert [rank["loss"] for rank in ranks] == pytest.approx([expected] * 2, rel=tolerance)
    assert [rank["loss with CUDA's copies"] for rank in ranks] == [rank["loss"] for rank in ranks]
    assert [rank["NaNs"] for rank in ranks] == [0, 0]


def train_eagerly_and_compiled(group: "ProcessGroup", folder: Path, config: TrainConfig) -> None:
    """Train three steps with eager layers, then with layers that aot_eager compiles."""
    from torch._dynamo.utils import counters

    vars(parallelize)["compile_layers"] = partial(compile_layers, backend="aot_eager")
    world, losses = world_of(group), []
    for is_compiled in (False, True):
        training = config.training.model_copy(update={"compile": is_compiled})
        changed = config.model_copy(update={"training": training})
        place = load_device(changed, world.rank, world.device)
        strategy = create(changed, world)
        strategy.prepare(adapted(load_model(changed, place, quantises=False), changed))
        for _ in range(3):
            loss = strategy.forward(inputs_of(Case("", {}), 0), is_last=True)
            strategy.backward(loss, scale=1e-2)
            strategy.step(1e-2, 1.0)
            losses.append(loss.item())
    graphs = counters["stats"]["unique_graphs"]
    found = {"losses": losses, "breaks": dict(counters["graph_break"]), "graphs": graphs}
    torch.save(found, folder / f"{world.rank}.pt")


@pytest.mark.full
def test_a_sharded_base_in_4_bits_compiles_without_a_graph_break(tmp_path: Path) -> None:
    config = train_config(
        tmp_path,
        model={"path": str(deep_model(tmp_path / "model"))},
        strategy={"type": "fsdp"},
        method=NF4,
        training={"precision": "bf16"},
        output={"format": "adapter"},
    )
    assert run_processes(train_eagerly_and_compiled, tmp_path, config, world_size=2) == [0, 0]
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found["breaks"] == {}
        assert found["graphs"] == 2, "the first layer's input needs no gradient"
        assert found["losses"][3:] == pytest.approx(found["losses"][:3], rel=1e-5)


@pytest.mark.full
def test_a_quantised_run_that_is_sharded_has_the_losses_of_one_that_is_not(
    inputs: Path, tmp_path: Path
) -> None:
    losses = {}
    for strategy, ranks in (("fsdp", 2), ("ddp", 1)):
        folder = tmp_path / strategy
        folder.mkdir()
        config = train_config(
            folder,
            world={"nproc_per_node": ranks},
            model={"path": str(inputs / "model"), "base_name": "org/tiny"},
            data={"train": {"path": str(inputs / "train.jsonl")}, "max_seq_len": 64},
            strategy={"type": strategy},
            method=NF4,
            training={"max_steps": 3, "learning_rate": 1e-2},
            output={"format": "both"},
        )
        assert attempt(config) == [ExitCode.DONE] * ranks
        losses[strategy] = [values[0] for values in numbers(config)["steps"].values()]
    assert losses["fsdp"] == pytest.approx(losses["ddp"], abs=1e-5)
