"""Embedding and head are gathered on their own under FSDP, and no gradient differs by it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from finetune_trainer.model.layers import decoder_layers
from finetune_trainer.model.loss import CausalLoss, base_of
from finetune_trainer.strategies.fsdp import FsdpStrategy
from finetune_trainer.strategies.fsdp_groups import choose_groups
from support.checkpoint.checkpoint_fixtures import run_processes
from support.model.every_family import tiny_model, tiny_settings
from support.strategies.parity import Case, build_model, case_config, inputs_of, world_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

RANKS, MICRO_BATCHES = 2, 2
RESHARDS = {"type": "fsdp", "reshard_after_forward": True, "reduce_each_micro_batch": True}
KEEPS = {"type": "fsdp", "reshard_after_forward": False, "reduce_each_micro_batch": False}


def case(name: str, strategy: dict[str, Any], method: str = "full") -> Case:
    return Case(name, strategy, method, precision="fp64", rows=4 * RANKS)


def untied() -> nn.Module:
    return build_model(case("", {}))


def tied() -> nn.Module:
    model: Any = untied()
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def saved() -> nn.Module:
    """Return a frozen model with adapters, and with an embedding and a head that are trained."""
    return _adapted(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])


def adapted() -> nn.Module:
    """Return a frozen model with adapters on embedding and head as well."""
    return _adapted(target_modules=["q_proj", "embed_tokens", "lm_head"])


def _adapted(**settings: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model: Any = untied()
    found: nn.Module = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, **settings))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in found.named_parameters():
        if "lora_" in name:  # else one of each pair is zero, and so is the other's gradient
            nn.init.normal_(parameter, std=0.1, generator=generator)
    return found.double()


def read_outside() -> nn.Module:
    """Return a model that takes a row of its embedding's weight where that is not called."""
    settings = tiny_settings("gemma4")
    settings.tie_word_embeddings = False
    model: nn.Module = tiny_model(settings)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Case]] = {
    "untied": (untied, case("untied", RESHARDS)),
    "untied, kept": (untied, case("untied-kept", KEEPS)),
    "untied, ahead": (untied, case("untied-ahead", {**RESHARDS, "prefetch": 1})),
    "tied": (tied, case("tied", RESHARDS)),
    "saved": (saved, case("saved", RESHARDS, "lora")),
    "adapted": (adapted, case("adapted", RESHARDS, "lora")),
}


@pytest.mark.parametrize(
    ("build", "embedding", "head"),
    [
        pytest.param(untied, "model.embed_tokens", "lm_head", id="untied"),
        pytest.param(tied, None, None, id="tied: one weight cannot be in two groups"),
        pytest.param(saved, "model.embed_tokens", "lm_head", id="saved beside adapters"),
        pytest.param(adapted, "model.embed_tokens", "lm_head", id="with adapters"),
        pytest.param(read_outside, None, "lm_head", id="read without being called"),
    ],
)
def test_embedding_and_head_have_groups_where_each_has_its_own_weights(
    build: Callable[[], nn.Module], embedding: str | None, head: str | None
) -> None:
    module = CausalLoss(build())
    groups, base = choose_groups(module), base_of(module.model)
    assert groups.embedding is (base.get_submodule(embedding) if embedding else None)
    assert groups.head is (base.get_submodule(head) if head else None)
    assert groups.layers


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the first of two ranks saw, by model."""
    folder = tmp_path_factory.mktemp("groups")
    assert run_processes(_step_all, folder, world_size=RANKS) == [0] * RANKS
    seen: dict[str, Any] = json.loads((folder / "0.json").read_text())
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_each_gradient_is_that_of_one_process(name: str, found: dict[str, Any]) -> None:
    differences = found[name]["differences"]
    assert differences
    assert max(differences.values()) < 1e-12


@pytest.mark.parametrize("name", ["untied", "untied, ahead", "saved", "adapted"])
def test_embedding_and_head_are_whole_only_while_they_are_needed(
    name: str, found: dict[str, Any]
) -> None:
    assert found[name]["whole"] == {
        "first layer": [],
        "head": ["head"],
        "first layer's backward": [],
        "after backward": [],
    }


def test_where_weights_are_kept_both_wait_for_the_last_backward(found: dict[str, Any]) -> None:
    assert found["untied, kept"]["whole"] == {
        "first layer": ["embedding"],
        "head": ["embedding", "head"],
        "first layer's backward": ["embedding", "head"],
        "after backward": [],
    }


@pytest.mark.parametrize("name", MODELS)
def test_parameters_have_the_names_that_checkpoints_know(name: str, found: dict[str, Any]) -> None:
    build, _ = MODELS[name]
    assert found[name]["names"] == [key for key, _ in build().named_parameters()]


def _step_all(group: "ProcessGroup | None", folder: Path) -> None:
    world, seen = world_of(group), {}
    for name, (build, settings) in MODELS.items():
        strategy = FsdpStrategy(case_config(settings, folder, RANKS), world)
        module = CausalLoss(build().train())
        strategy.prepare(module)
        whole = _watch(module)
        for turn in range(MICRO_BATCHES):
            inputs = inputs_of(settings, turn * RANKS + world.rank)
            loss = strategy.forward(inputs, is_last=turn == MICRO_BATCHES - 1)
            strategy.backward(loss, scale=1.0)
        whole["after backward"] = _whole(module)
        seen[name] = {
            "differences": _differences(module, _expected(build, settings)),
            "whole": whole,
            "names": [key for key, _ in module.model.named_parameters()],
        }
    (folder / f"{world.rank}.json").write_text(json.dumps(seen))


def _expected(build: Callable[[], nn.Module], settings: Case) -> dict[str, Tensor]:
    """Return gradients of all ranks' micro-batches, made by the same loss in this process."""
    module = CausalLoss(build())
    for step in range(RANKS * MICRO_BATCHES):
        (module(**inputs_of(settings, step)) / RANKS).backward()
    return {name: p.grad for name, p in module.model.named_parameters() if p.grad is not None}


def _differences(module: CausalLoss, expected: dict[str, Tensor]) -> dict[str, float]:
    gradients = {n: p.grad for n, p in module.model.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    differences = {}
    for name, gradient in gradients.items():
        assert isinstance(gradient, DTensor)
        off = (gradient.full_tensor() - expected[name]).norm() / expected[name].norm()
        differences[name] = off.item()
    return differences


def _watch(module: CausalLoss) -> dict[str, list[str]]:
    """Note of the first micro-batch which of the two are whole at some moments of its passes."""
    whole: dict[str, list[str]] = {}
    base = base_of(module.model)

    def note(moment: str) -> None:
        whole.setdefault(moment, _whole(module))

    def after_first(_: nn.Module, args: Any, output: Tensor) -> None:
        note("first layer")
        output.register_hook(lambda _: note("first layer's backward"))

    decoder_layers(base)[0].register_forward_hook(after_first)
    base.get_output_embeddings().register_forward_hook(lambda *_: note("head"))
    return whole


def _whole(module: CausalLoss) -> list[str]:
    base = base_of(module.model)
    ends = {"embedding": base.get_input_embeddings(), "head": base.get_output_embeddings()}
    return [
        name
        for name, end in ends.items()
        if not any(isinstance(p, DTensor) for p in end.parameters())
    ]
