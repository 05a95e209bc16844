"""AdamW with moments in 8 bits: torchao's numbers, the same on any ranks, nothing of a bad step."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from finetune_trainer.config import TrainingConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.model.loss import CausalLoss
from finetune_trainer.strategies import adamw8bit
from finetune_trainer.strategies.adamw8bit import AdamW8bit
from finetune_trainer.strategies.blockwise import Codebook, block_length, decode, encode, value_map
from finetune_trainer.strategies.ddp import DdpStrategy
from finetune_trainer.strategies.fsdp import FsdpStrategy
from finetune_trainer.strategies.optimizer import NativeOptimizer
from finetune_trainer.strategies.rounding import key_of, rounded
from finetune_trainer.world import World
from support.strategies.parity import Case, build_model, case_config, inputs_of

CPU = torch.device("cpu")
RATE = 1e-2
SETTINGS = TrainingConfig(
    global_batch_size=1,
    max_steps=1,
    learning_rate=RATE,
    precision="bf16",
    optimizer="adamw8bit",
    weight_decay=0.1,
)


class Layer(nn.Module):
    """A matrix in blocks of 192, a matrix whose rows are no multiple of anything, and a vector."""

    wide: nn.Parameter
    bias: nn.Parameter

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for name, shape in (("wide", (14, 576)), ("odd", (6, 37)), ("bias", (9,))):
            setattr(self, name, nn.Parameter(torch.randn(shape, dtype=torch.bfloat16)))


def gradients(module: nn.Module, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator).bfloat16() for p in module.parameters()]


def optimizer_of(parameter: nn.Parameter, *, compiled: bool = False) -> AdamW8bit:
    return AdamW8bit({parameter: 0.1}, {parameter: "wide"}, seed=0, compiled=compiled)


def step(optimizer: AdamW8bit, *, is_finite: bool = True) -> None:
    optimizer.step(RATE, torch.tensor(0.5), torch.tensor(is_finite))


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        pytest.param((14336, 4096), 256, id="a matrix of Llama 8B"),
        pytest.param((49152, 576), 192, id="rows of 576"),
        pytest.param((8, 5760, 2880), 256, id="stacked experts"),
        pytest.param((64, 37), 37, id="short rows are a block each"),
        pytest.param((64, 509), None, id="a prime has no blocks"),
        pytest.param((64, 16), None, id="scales would outweigh what they save"),
        pytest.param((4096,), None, id="a vector"),
    ],
)
def test_a_block_never_reaches_over_two_indices_of_what_is_sharded(
    shape: Sequence[int], expected: int | None
) -> None:
    assert block_length(torch.Size(shape)) == expected


@pytest.mark.parametrize("signed", [True, False])
def test_codes_stand_for_the_nearest_of_torchaos_values(signed: bool) -> None:
    from torchao.optim.quant_utils import create_dynamic_map

    shares = value_map(signed=signed)
    assert shares == pytest.approx(create_dynamic_map(signed), rel=1e-6)
    values = torch.randn(50, 64) * torch.logspace(-6, 2, 50)[:, None]
    values = values if signed else values.square()
    codebook = Codebook.on(CPU, signed=signed)
    codes, scales = encode(values, codebook)
    exact = values / scales[:, None]
    choices = torch.tensor(shares if signed else shares[1:])  # no variance is read as 0
    nearest = (exact[..., None] - choices).abs().amin(-1)
    found = decode(codes, scales, codebook) / scales[:, None]
    torch.testing.assert_close((exact - found).abs(), nearest, rtol=1e-4, atol=1e-7)


def test_an_update_is_torchaos_but_for_the_rounding() -> None:
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_8bit import OptimState8bit

    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(64, 512).bfloat16())
    ours = optimizer_of(parameter)
    moments = [OptimState8bit.zeros(parameter.shape, signed) for signed in (True, False)]
    count, rate = torch.tensor(0.0), torch.tensor(RATE)
    for _ in range(3):
        parameter.grad = torch.randn_like(parameter)
        theirs, state = parameter.detach().float(), ours.state[parameter]
        for name, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            # Where two summands cancel, codes that are one apart become dozens apart.
            moment.codes.copy_(state[f"{name}.codes"])
            moment.scale.copy_(state[f"{name}.scales"].flatten())
        step(ours)
        count += 1
        grad = parameter.grad.float() * 0.5
        single_param_adam(
            theirs, grad, count, *moments, None, rate, 0.9, 0.999, 0.1, 1e-8, True, False
        )
        for name, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            expected = moment.codes.int()
            expected = expected if moment.signed else expected.clamp(min=1)  # see decision 0075
            apart = (state[f"{name}.codes"].int() - expected).abs()
            assert apart.max() <= 1  # where a value is halfway between two codes
            assert (apart > 0).float().mean() < 1e-2
            torch.testing.assert_close(state[f"{name}.scales"].flatten(), moment.scale)
        off = (parameter.detach().float() - theirs).abs() / theirs.abs()
        assert off.max() < 2**-7, "a neighbour in bf16"


def test_rounding_is_right_on_average_and_leaves_bf16_alone() -> None:
    key, rows = torch.tensor(key_of(3, "name"), dtype=torch.int32), torch.arange(4_000).int()
    for value in (1.0 + 2**-10, -0.3, 3e-5):
        found = rounded(torch.full((4_000, 64), value), key, rows).float()
        low, high = found.min().item(), found.max().item()
        assert low < value < high
        assert high - low <= 2**-7 * abs(value)
        # 256,000 draws: five standard deviations of their mean
        assert abs(found.double().mean().item() - value) < 5 * (high - low) / 2 / 256_000**0.5
        chosen = (found == high).float()
        assert abs(torch.corrcoef(chosen[:, :2].T)[0, 1]) < 0.08, "neighbours in a row"
        assert abs(torch.corrcoef(chosen[:2])[0, 1]) < 0.65, "neighbours in a column"
    exact = torch.randn(16, 64).bfloat16()
    assert torch.equal(rounded(exact.float(), key, rows[:16]), exact)


def test_another_step_or_parameter_rounds_otherwise() -> None:
    values = torch.randn(8, 64)
    rows = torch.arange(8).int()
    found = [
        rounded(values, torch.tensor(key, dtype=torch.int32), rows)
        for key in (key_of(0, "a"), key_of(0, "a") ^ 1, key_of(0, "b"), key_of(1, "a"))
    ]
    for one, other in itertools.pairwise(found):
        assert 0.2 < (one != other).float().mean() < 0.5


@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_every_number_of_ranks_makes_the_same_bits(ranks: int) -> None:
    whole = nn.Parameter(Layer().wide.detach().clone())
    alone = optimizer_of(whole)
    rounds = [torch.randn(whole.shape).bfloat16() for _ in range(3)]
    for grad in rounds:
        whole.grad = grad
        step(alone)
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        try:
            mesh = init_device_mesh("cpu", (ranks,))

            def shard(tensor: Tensor, mesh=mesh, rank=rank) -> DTensor:
                parts = tensor.chunk(ranks)
                mine = parts[rank] if rank < len(parts) else tensor[:0]
                return DTensor.from_local(
                    mine.clone(), mesh, [Shard(0)], shape=tensor.shape, stride=tensor.stride()
                )

            # Not wrapped: torch remembers what a `Parameter` of the last mesh was.
            part = cast("nn.Parameter", shard(Layer().wide.detach()))
            optimizer = optimizer_of(part)
            for grad in rounds:
                part.grad = shard(grad)
                step(optimizer)
            for ours, theirs in (
                (part.detach(), whole.detach()),
                *(
                    (value, alone.state[whole][name])
                    for name, value in optimizer.state[part].items()
                ),
            ):
                if theirs.ndim == 0:  # the step
                    assert torch.equal(ours, theirs)
                    continue
                assert isinstance(ours, DTensor)
                assert ours.shape == theirs.shape
                assert torch.equal(local(ours), local(shard(theirs)))
        finally:
            dist.destroy_process_group()


def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing() -> None:
    module = Layer()
    optimizer = NativeOptimizer(module, SETTINGS, CPU)
    for number, bad in ((0, None), (1, float("nan")), (2, float("inf"))):
        before = {
            f"{section}.{name}": tensor.clone()
            for section, tensors in optimizer.state().items()
            for name, tensor in tensors.items()
        }
        for parameter, grad in zip(module.parameters(), gradients(module, number), strict=True):
            parameter.grad = grad
        if bad is not None:
            assert module.bias.grad is not None
            module.bias.grad[3] = bad
        norm = optimizer.step(RATE, max_norm=1.0)
        assert norm.dtype == torch.float32
        assert norm.isfinite().item() == (bad is None)
        after = optimizer.state()
        changed = {
            name
            for name, tensor in before.items()
            if not torch.equal(tensor, after[name.split(".")[0]][name.split(".", 1)[1]])
        }
        assert changed == (set(before) if bad is None else set())


def test_a_step_reads_no_value_on_the_host() -> None:
    with FakeTensorMode():
        module = Layer()
        optimizer = NativeOptimizer(module, SETTINGS, CPU)
        for parameter in module.parameters():
            parameter.grad = torch.empty_like(parameter)
        optimizer.step(RATE, max_norm=1.0)  # a fake tensor has none, so asking it raises


def test_moments_take_about_a_byte_each_and_nothing_else_stays() -> None:
    parameter = nn.Parameter(torch.zeros(512, 4096, dtype=torch.bfloat16))
    state = optimizer_of(parameter).state[parameter]
    taken = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    assert taken / parameter.numel() == pytest.approx(2 * (1 + 4 / 256), rel=1e-3)


@pytest.mark.parametrize(
    ("strategy", "batch", "is_warned"),
    [("ddp", 64, False), ("ddp", 65, True), ("fsdp", 128, False), ("fsdp", 130, True)],
)
def test_many_sums_in_bf16_are_warned_of(
    tmp_path: Path, strategy: str, batch: int, is_warned: bool
) -> None:
    found, sums = said_of_sums(tmp_path, strategy, batch, is_reduced=True)
    assert ("of 65 micro-batches in bf16" in found) == is_warned
    assert sums == torch.bfloat16


def test_whole_gradients_of_fsdp_are_added_up_in_fp32_and_nothing_is_warned(tmp_path: Path) -> None:
    found, sums = said_of_sums(tmp_path, "fsdp", 130, is_reduced=False)
    assert found == ""
    assert sums is None, "not in the shards"


def said_of_sums(
    folder: Path, strategy: str, batch: int, *, is_reduced: bool
) -> tuple[str, torch.dtype | None]:
    """Return what is warned of, and in what gradients of two micro-batches are added up."""
    reduced = {"reduce_each_micro_batch": is_reduced} if strategy == "fsdp" else {}
    case = Case("", {"type": strategy, **reduced}, precision="bf16")
    config = case_config(case, folder, 2 if strategy == "fsdp" else 1)
    changes = {"optimizer": "adamw8bit", "global_batch_size": batch, "micro_batch_size": 1}
    training = config.training.model_copy(update=changes)
    config = config.model_copy(update={"training": training})
    said: list[str] = []
    module = CausalLoss(build_model(case).bfloat16())
    if strategy == "ddp":
        made: DdpStrategy | FsdpStrategy = DdpStrategy(config, World(0, 0, 1, CPU))
        return _two_sums(made, module, case, said)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        world = World(0, 0, 2, CPU, dist.group.WORLD, None, None)
        made = FsdpStrategy(config, world)
        return _two_sums(made, module, case, said)
    finally:
        dist.destroy_process_group()


def _two_sums(
    strategy: DdpStrategy | FsdpStrategy, module: CausalLoss, case: Case, said: list[str]
) -> tuple[str, torch.dtype | None]:
    strategy.prepare(module, said.append)
    for _ in range(2):
        strategy.backward(strategy.forward(inputs_of(case, 0), is_last=False), scale=1.0)
    gradients = (weight.grad for weight in strategy.model.parameters())
    return "".join(said), next((one.dtype for one in gradients if one is not None), None)


def test_parameters_in_fp32_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"adamw8bit: the trained parameter wide is torch.float32"
    ):
        NativeOptimizer(Layer().float(), SETTINGS, CPU)


def refusing(graph: object, inputs: object) -> Callable[..., None]:
    raise RuntimeError("no such kernel")


def test_a_pass_that_cannot_be_compiled_is_made_as_it_is_with_one_warning() -> None:
    said: list[str] = []
    found = []
    for update in (adamw8bit.update, adamw8bit.compiled_update(said.append, refusing)):
        parameter = nn.Parameter(Layer().wide.detach().clone())
        optimizer = optimizer_of(parameter)
        optimizer._update = update
        for number in range(2):
            generator = torch.Generator().manual_seed(number)
            parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
            step(optimizer)
        found.append(parameter.detach())
    assert torch.equal(*found)
    assert not torch.equal(found[0], Layer().wide.detach())
    assert said == [
        "spec.training.optimizer adamw8bit is not compiled: RuntimeError: no such kernel"
    ]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
def test_the_compiled_pass_comes_to_the_same_codes() -> None:
    compiled = torch.compile(adamw8bit.update)
    found = []
    for update in (adamw8bit.update, compiled):
        parameter = nn.Parameter(Layer().wide.detach().clone())
        optimizer = optimizer_of(parameter)
        for number in range(2):
            parameter.grad = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(number)
            ).bfloat16()
            state = optimizer.state[parameter]
            scalars = adamw8bit.Scalars(
                step=state["step"],
                is_finite=torch.tensor(True),
                factor=torch.tensor(0.5),
                learning_rate=torch.tensor(RATE),
                decay=torch.tensor(0.0),
                key=torch.tensor(5, dtype=torch.int32),
            )
            with torch.no_grad():
                for piece in adamw8bit._pieces(parameter, state, optimizer._codes[CPU]):
                    update(*adamw8bit._with_dynamic_length(piece), scalars)
            state["step"] += 1
        found.append((parameter.detach().float(), state["exp_avg.codes"].int()))
    (weights, codes), (other_weights, other_codes) = found
    assert (codes - other_codes).abs().max() <= 1
    torch.testing.assert_close(weights, other_weights, rtol=2**-7, atol=1e-4)
