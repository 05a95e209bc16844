"""The same training twice: under a strategy on several ranks, and as a plain loop in one process.

`train_cases` starts the ranks once and runs many cases in a row, as imports cost more than steps.
`reference` shares no code with the trainer: it pads, masks, normalises and clips by itself.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from finetune_trainer.config import TrainConfig
from finetune_trainer.data.batch import MicroBatch
from finetune_trainer.model.loss import CausalLoss, loss_inputs, scale_factor
from finetune_trainer.strategies import create
from finetune_trainer.strategies.base import Strategy
from finetune_trainer.world import World
from support.checkpoint.checkpoint_fixtures import run_processes
from support.launch.launches import train_config

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

VOCAB = 256
LONGEST = 24
MAX_NORM = 1.0
Row = tuple[list[int], list[bool]]  # tokens, and which of them are to be predicted


def uneven_rows(case: "Case", step: int) -> list[Row]:
    """Return rows of very unequal length and label counts; every fourth has no label at all."""
    generator = torch.Generator().manual_seed(step)
    rows = []
    for index in range(case.rows):
        length = int(torch.randint(3, LONGEST + 1, (1,), generator=generator))
        tokens = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        first = length if index % 4 == 3 else 1 + index * length // case.rows
        rows.append((tokens, [place >= first for place in range(length)]))
    return rows


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        name: Unlike that of any other case of the launch.
        strategy: Values of `StrategyConfig`.
        method: "full" or "lora" (r 4 on all linear layers, B not zero).
        hidden_size: Of the model.
        micro_batch_size: Rows of one forward pass of one rank; the rest is accumulated.
        rows: Of one optimizer step.
        rows_of: Makes the rows of a step.
        poison: Step and rank where the gradient of every micro-batch is made not finite.
    """

    name: str
    strategy: Mapping[str, Any]
    method: str = "full"
    precision: str = "fp32"
    hidden_size: int = 32
    micro_batch_size: int = 2
    rows: int = 8
    steps: int = 20
    learning_rate: float = 1e-3
    rows_of: Callable[["Case", int], list[Row]] = uneven_rows
    poison: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came of it: mean loss and gradient norm of each step, and the weights at the end."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def build_model(case: Case) -> nn.Module:
    """Return the model a case begins with, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=case.hidden_size,
            intermediate_size=2 * case.hidden_size,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
        )
    )
    if case.method == "lora":
        model = _with_adapters(model)
    return model.double() if case.precision == "fp64" else model


def _with_adapters(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    adapted: nn.Module = get_peft_model(model, lora)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return adapted


def reference(case: Case) -> Outcome:
    """Train in this process, a step in one padded batch; a poisoned step changes nothing."""
    model = build_model(case)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=case.learning_rate, weight_decay=0.0, foreach=False)
    losses, norms = [], []
    for step in range(case.steps):
        rows = case.rows_of(case, step)
        ids = torch.zeros(len(rows), LONGEST, dtype=torch.int64)
        labels = torch.full((len(rows), LONGEST), -100)
        for place, (tokens, is_label) in enumerate(rows):
            ids[place, : len(tokens)] = torch.tensor(tokens)
            wanted = [t if label else -100 for t, label in zip(tokens, is_label, strict=True)]
            labels[place, : len(tokens)] = torch.tensor(wanted)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        gradients = [p.grad for p in trained if p.grad is not None]
        assert len(gradients) == len(trained)
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.mul_(min(1.0, MAX_NORM / float(norm)))
        is_skipped = case.poison is not None and case.poison[0] == step
        if not is_skipped:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(math.nan if is_skipped else norm.item())
    return Outcome(losses, norms, _weights(model))


def train_cases(
    folder: Path,
    cases: Sequence[Case],
    *,
    world_size: int = 2,
    timeout: float = 240,
    deepspeed: bool = False,
) -> dict[str, Outcome]:
    """Train every case under its strategy, on ranks that are started once; losses agree on all.

    Returns:
        What came of each, by the case's name.
    """
    folder.mkdir(exist_ok=True)
    codes = run_processes(
        _train_all,
        folder,
        list(cases),
        world_size=world_size,
        timeout_seconds=timeout,
        deepspeed=deepspeed,
    )
    assert codes == [0] * world_size, f"the ranks' exit codes: {codes}"
    outcomes = {}
    for case in cases:
        ranks = [torch.load(folder / f"{case.name}.{rank}.pt") for rank in range(world_size)]
        for other in ranks[1:]:
            assert other["losses"] == ranks[0]["losses"], case.name
            torch.testing.assert_close(
                other["norms"], ranks[0]["norms"], rtol=0, atol=0, equal_nan=True
            )
        outcomes[case.name] = Outcome(**ranks[0])
    return outcomes


@cache
def expected(method: str) -> Outcome:
    """Return what a plain loop makes of the case that says no more than this."""
    return reference(Case("", {}, method=method))


def case_config(case: Case, folder: Path, world_size: int, **changes: Any) -> TrainConfig:
    """Return the configuration of a case."""
    is_lora = case.method == "lora"
    return train_config(
        folder,
        world={"nproc_per_node": world_size},
        method={"type": case.method, **({"lora": {"r": 4}} if is_lora else {})},
        strategy=dict(case.strategy),
        training={
            "global_batch_size": case.rows,
            "micro_batch_size": case.micro_batch_size,
            "max_steps": case.steps,
            "learning_rate": case.learning_rate,
            "max_grad_norm": MAX_NORM,
            "precision": case.precision,
        },
        **changes,
    )


def worst_differences(found: Outcome, expected: Outcome) -> tuple[float, float, float]:
    """Return the largest differences: of losses, of norms (relative), of weights (per tensor)."""
    assert found.weights.keys() == expected.weights.keys()
    pairs = list(zip(found.norms, expected.norms, strict=True))
    assert all(math.isfinite(a) == math.isfinite(b) for a, b in pairs)
    loss = max(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True))
    norm = max(abs(a - b) / b for a, b in pairs if math.isfinite(b))
    weights = max(
        float((found.weights[name].double() - weight.double()).norm() / weight.double().norm())
        for name, weight in expected.weights.items()
    )
    return loss, norm, weights


def within_fp32(found: Outcome, expected: Outcome) -> None:
    """Assert what twenty steps in fp32 may differ by."""
    loss, norm, weights = worst_differences(found, expected)
    assert loss <= 3e-6
    assert norm <= 1e-5
    assert weights <= 5e-5


def _train_all(group: "ProcessGroup | None", folder: Path, cases: Sequence[Case]) -> None:
    world = world_of(group)
    for case in cases:
        outcome = train_case(case, folder, world)
        torch.save(vars(outcome), folder / f"{case.name}.{world.rank}.pt")


def world_of(group: "ProcessGroup | None") -> World:
    """Return the world that `run_processes` has opened, or one of this process alone."""
    if group is None:
        return World(0, 0, 1, torch.device("cpu"))
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    return World(rank, rank, size, torch.device("cpu"), dist.group.WORLD, group, group)


def train_case(case: Case, folder: Path, world: World) -> Outcome:
    """Train one case on this rank; whole weights come back on rank 0 alone."""
    strategy = prepared(case, folder, world)
    losses, norms = train_steps(strategy, case, world, range(case.steps))
    whole = strategy.whole_model()
    return Outcome(losses, norms, _weights(whole) if whole is not None else {})


def prepared(case: Case, folder: Path, world: World, **changes: Any) -> Strategy:
    """Return the case's strategy around its model; `changes` are those of `train_config`."""
    strategy = create(case_config(case, folder, world.world_size, **changes), world)
    strategy.prepare(CausalLoss(build_model(case)))
    return strategy


def train_steps(
    strategy: Strategy, case: Case, world: World, steps: Iterable[int]
) -> tuple[list[float], list[float]]:
    """Make optimizer steps as the loop does, and return mean loss and gradient norm of each."""
    losses, norms = [], []
    for step in steps:
        rows = case.rows_of(case, step)
        num_labels = sum(sum(is_label[1:]) for _, is_label in rows)
        scale = scale_factor(num_labels, world.world_size)
        if case.poison == (step, world.rank):
            scale = math.inf
        size, stride = case.micro_batch_size, case.micro_batch_size * world.world_size
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, case.rows, stride):
            first = start + world.rank * size
            inputs = loss_inputs(_collate(rows[first : first + size]), world.device)
            is_last = start + stride >= case.rows
            loss_sum = strategy.forward(inputs, is_last=is_last)
            strategy.backward(loss_sum, scale=scale)
            total += loss_sum.detach()
        norms.append(strategy.step(case.learning_rate, MAX_NORM).item())
        losses.append(world.sum(total).item() / num_labels)
    return losses, norms


def inputs_of(case: Case, step: int) -> dict[str, Tensor]:
    """Return the loss module's arguments for all rows of a step at once."""
    return loss_inputs(_collate(case.rows_of(case, step)), torch.device("cpu"))


def _collate(rows: Sequence[Row]) -> MicroBatch:
    width = max(len(tokens) for tokens, _ in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    targets = torch.full((len(rows), width), -100)
    for place, (tokens, is_label) in enumerate(rows):
        ids[place, : len(tokens)] = torch.tensor(tokens)
        wanted = [t if label else -100 for t, label in zip(tokens, is_label, strict=True)][1:]
        targets[place, : len(wanted)] = torch.tensor(wanted, dtype=torch.int64)
    positions = torch.arange(width).expand(len(rows), -1).contiguous()
    tokens_of = sum(len(tokens) for tokens, _ in rows)
    return MicroBatch.of(ids, positions, targets, tokens=tokens_of)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}
