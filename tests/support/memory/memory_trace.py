"""The memory of the trainer's own step, traced: storages that are alive, in fake tensors or real.

Fake tensors have shapes and types of any size and no content, so an 8B model is traced in seconds.
What a GPU would choose is chosen: attention in one kernel, and the head's chunk.
"""

import dataclasses
import gc
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finetune_trainer import loop
from finetune_trainer.config import TrainConfig
from finetune_trainer.data.batch import MicroBatch
from finetune_trainer.memory.read_base import read_base
from finetune_trainer.model import attention, fused_head
from finetune_trainer.model.adapters import choose_trained
from finetune_trainer.model.layers import decoder_layers
from finetune_trainer.model.load import without_weights
from finetune_trainer.model.loss import CausalLoss, loss_inputs
from finetune_trainer.model.prepare import prepare_model
from finetune_trainer.model.quantize import use_pure_products
from finetune_trainer.sizing.method import with_method
from finetune_trainer.sizing.model_shape import ModelShape
from finetune_trainer.sizing.peak import ELEMENTS_PER_PASS
from finetune_trainer.strategies import adamw8bit, create
from finetune_trainer.telemetry.phases import PhaseClock
from finetune_trainer.telemetry.slots import Block
from finetune_trainer.world import World
from support.launch.launches import train_config

CPU = torch.device("cpu")


class StorageTrace(TorchDispatchMode):
    """Counts the bytes of all storages that any operator has returned and that are alive.

    Attributes:
        alive: Bytes now.
        peak: The most so far; set it to `alive` to begin anew.
        at_peak: Bytes by size, count and operator of what was alive at the peak, where `explains`.
    """

    def __init__(self, *, explains: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.peak = 0
        self.at_peak: dict[tuple[str, int], int] = {}
        self._explains = explains
        self._sizes: dict[int, tuple[int, str]] = {}
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._resizable: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.see(tensor, str(func))
        self._remeasure()
        if self.alive > self.peak:
            self.peak = self.alive
            if self._explains:
                self.at_peak = {}
                for size, name in self._sizes.values():
                    self.at_peak[name, size] = self.at_peak.get((name, size), 0) + size
        return result

    def see(self, tensor: Tensor, name: str = "") -> None:
        """Count the storage of a tensor, once."""
        local = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
        storage = local.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        size = storage.nbytes()
        self._sizes[key] = (size, name)
        self.alive += size
        self._refs[key] = weakref.ref(storage, lambda _: self._forget(key))
        if name == "aten.empty.memory_format":
            self._resizable[key] = self._refs[key]

    def _forget(self, key: int) -> None:
        size, _ = self._sizes.pop(key, (0, ""))
        self.alive -= size
        self._refs.pop(key, None)
        self._resizable.pop(key, None)

    def _remeasure(self) -> None:
        """FSDP frees gathered weights by giving their storages no size."""
        for key, ref in list(self._resizable.items()):
            storage = ref()
            if storage is None or key not in self._sizes:
                continue
            size, name = self._sizes[key]
            if (now := storage.nbytes()) != size:
                self.alive += now - size
                self._sizes[key] = (now, name)


@dataclasses.dataclass(frozen=True)
class Traced:
    """Bytes: of parameters, of moments and the like at rest, at the peak of a step."""

    parameters: int
    at_rest: int
    peak: int
    after_forward: int
    shape: Any = None
    config: Any = None
    explained: Mapping[tuple[str, int], int] = dataclasses.field(default_factory=dict)


def trace_step(
    folder: Path,
    settings: Any,
    *,
    tokens: int,
    explains: bool = False,
    as_on: Callable[[], AbstractContextManager[None]] | None = None,
    **changes: Any,
) -> Traced:
    """Trace two steps of `settings`' model with fake tensors; the second is the one that counts.

    Args:
        folder: For a configuration.
        settings: A configuration of transformers; nothing is loaded.
        tokens: Of a row; it is one document.
        explains: Keep what is alive at the peak.
        as_on: Chooses kernels; by default those of a GPU.
        changes: Of `train_config`.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = train_config(folder, **changes)
    world = World(0, 0, config.world.world_size, CPU)
    model = meta_model(settings, config)
    model = choose_trained(in_four_bits(model, config), config)
    shape = shape_of(settings, config)
    with (as_on or as_on_a_gpu)(), ExitStack() as stack:
        group = stack.enter_context(fake_ranks(world.world_size))
        world = dataclasses.replace(world, group=group)
        module = prepare_model(model, config, CPU)
        batch = row_batch(config.training.micro_batch_size, tokens)
        inputs = loss_inputs(batch, CPU)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        inputs = {name: fake.from_tensor(tensor) for name, tensor in inputs.items()}
        strategy = create(config, world)
        with fake:
            _materialise(module, fake.from_tensor)
            strategy.prepare(module)
            trace = StorageTrace(explains=explains)
            for tensor in _at_rest(strategy, module):
                trace.see(tensor, "at rest")
            with trace:
                traced = _steps(strategy, config, world, trace, lambda: inputs, batch)
    return dataclasses.replace(traced, shape=shape, config=config)


def _steps(
    strategy: Any,
    config: TrainConfig,
    world: World,
    trace: StorageTrace,
    inputs: Callable[[], dict[str, Tensor]],
    batch: MicroBatch,
) -> Traced:
    """Make two steps as the loop does."""
    phases = PhaseClock(Block.private())
    run: Any = SimpleNamespace(
        world=world, strategy=strategy, telemetry=SimpleNamespace(phases=phases, alive=dict)
    )
    gc.collect()  # what preparing has left in cycles
    parameters = sum(map(_size, strategy.model.parameters()))
    at_rest = after_forward = trace.alive
    backward = strategy.backward

    def noted(loss: Tensor, *, scale: float) -> None:
        nonlocal after_forward
        after_forward = trace.alive
        backward(loss, scale=scale)

    strategy.backward = noted
    with mock.patch.object(loop, "loss_inputs", side_effect=lambda *_: inputs()):
        for _ in range(2):
            at_rest, trace.peak = trace.alive, trace.alive
            count = config.gradient_accumulation_steps
            for index in range(count):
                loop._micro_batch(run, batch, 1.0, is_last=index == count - 1)
            strategy.step(1e-4, 1.0)
    return Traced(parameters, at_rest, trace.peak, after_forward, explained=trace.at_peak)


def meta_model(settings: Any, config: TrainConfig) -> Any:
    """Return the model that the trainer would load, on the meta device with real buffers."""
    from finetune_trainer.model.load import _base_dtype

    model = without_weights(settings, _base_dtype(config))
    return model.train()


def shape_of(settings: Any, config: TrainConfig) -> ModelShape:
    """Return what the formula sees of a model."""
    model = without_weights(settings, torch.bfloat16)
    return with_method(read_base(model.train()), config)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Choose on a CPU what is chosen on a GPU."""

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        batch, _, length, _ = query.shape
        rows = [t.to(value.dtype).transpose(1, 2).flatten(0, 1) for t in (query, key, value)]
        window = kwargs.get("sliding_window") or 0
        output = attention._attend_at_once(rows, mask[0, 0, 0], mask.shape[2], window, scaling)
        return output.to(value.dtype).view(batch, length, *output.shape[1:]), None

    with (
        mock.patch.object(attention, "_attend", attend),
        mock.patch.object(fused_head, "_CHUNK_BYTES_ON_CPU", fused_head._CHUNK_BYTES),
        mock.patch.object(adamw8bit, "_ELEMENTS_PER_PASS_ON_CPU", ELEMENTS_PER_PASS),
    ):
        yield


@contextmanager
def by_sdpa() -> Iterator[None]:
    """Attend in one kernel that real and fake CPU tensors have."""

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        query, key = query.to(value.dtype), key.to(value.dtype)
        output = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return output.transpose(1, 2), None

    with mock.patch.object(attention, "_attend", attend):
        yield


def allocated_step(folder: Path, settings: Any, *, tokens: int, **changes: Any) -> Traced:
    """Make the same two steps with real tensors; the peak is what torch's allocator has counted."""
    config = train_config(folder, **changes)
    world = World(0, 0, 1, CPU)
    with by_sdpa():
        model = choose_trained(meta_model(settings, config), config)
        module = prepare_model(model, config, CPU)
        _materialise(module, lambda buffer: buffer)
        strategy = create(config, world)
        strategy.prepare(module)
        batch = row_batch(config.training.micro_batch_size, tokens)
        inputs = loss_inputs(batch, CPU)
        trace = StorageTrace()
        for tensor in _at_rest(strategy, module):
            trace.see(tensor)
        at_rest = trace.alive
        with torch.profiler.profile(profile_memory=True) as profiled:
            _steps(strategy, config, world, trace, lambda: inputs, batch)
    return Traced(0, at_rest, at_rest + _allocated(profiled), 0)


def _allocated(profiled: Any) -> int:
    """Return the most that was allocated at a time since profiling began."""
    from torch._C._profiler import _EventType

    nodes, found = list(profiled.profiler.kineto_results.experimental_event_tree()), []
    while nodes:
        node = nodes.pop()
        nodes.extend(node.children)
        if node.tag == _EventType.Allocation:
            found.append((node.start_time_ns, node.extra_fields.alloc_size))
    alive = peak = 0
    for _, size in sorted(found, key=lambda event: event[0]):
        alive += size
        peak = max(peak, alive)
    return peak


@contextmanager
def fake_ranks(world_size: int) -> Iterator[Any]:
    """Open a group in which this process is rank 0 of so many, and nobody answers."""
    if world_size == 1:
        yield None
        return
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def row_batch(rows: int, tokens: int) -> MicroBatch:
    """Return rows of one document each, of which every token is learned."""
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    positions = torch.arange(tokens).expand(rows, -1).contiguous()
    return MicroBatch.of(ids, positions, torch.ones_like(ids), tokens=rows * tokens)


def _materialise(module: CausalLoss, buffer_of: Callable[[Tensor], Tensor]) -> None:
    """Put every parameter and buffer into host memory, fake or real, tied ones together."""
    made: dict[Tensor, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is None:
                continue
            if parameter not in made and hasattr(parameter, "quant_state"):
                made[parameter] = _packed(parameter.quant_state.shape)
            elif parameter not in made:
                data = torch.full(parameter.shape, 0.01, dtype=parameter.dtype)
                made[parameter] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            part._parameters[name] = made[parameter]
            if hasattr(made[parameter], "quant_state"):
                part.quant_state = made[parameter].quant_state  # type: ignore[attr-defined]
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = buffer_of(buffer)


def in_four_bits(model: Any, config: TrainConfig) -> Any:
    """Put bitsandbytes' layers in place of the decoder's linear ones, as loading with nf4 does."""
    if config.method.quantization != "nf4":
        return model
    bnb: Any = import_module("bitsandbytes.nn")

    for layer in decoder_layers(model):
        for part in layer.modules():
            for name, linear in list(part.named_children()):
                if type(linear) is nn.Linear:
                    made = bnb.Linear4bit(
                        linear.in_features,
                        linear.out_features,
                        bias=False,
                        compute_dtype=torch.bfloat16,
                        quant_type="nf4",
                        device="meta",
                    )
                    made.weight = bnb.Params4bit(
                        torch.empty(
                            linear.weight.numel() // 2, 1, dtype=torch.uint8, device="meta"
                        ),
                        requires_grad=False,
                        quant_state=SimpleNamespace(shape=linear.weight.shape),
                        quant_type="nf4",
                        bnb_quantized=True,
                    )
                    made.quant_state = made.weight.quant_state
                    setattr(part, name, made)
    use_pure_products(model)
    model.is_loaded_in_4bit = True
    return model


def _packed(shape: Sequence[int]) -> nn.Parameter:
    """Return a weight in 4 bits with its doubly quantised scales, without values.

    bitsandbytes' own class cannot be made of fake tensors; its layers ask for the attribute alone.
    """
    QuantState: Any = import_module("bitsandbytes.functional").QuantState  # noqa: N806

    count = math.prod(shape)
    blocks = count // 64
    weight = nn.Parameter(torch.empty(count // 2, 1, dtype=torch.uint8), requires_grad=False)
    weight.quant_state = QuantState(  # type: ignore[attr-defined]
        torch.empty(blocks, dtype=torch.uint8),
        shape=torch.Size(shape),
        code=torch.empty(16),
        blocksize=64,
        quant_type="nf4",
        dtype=torch.bfloat16,
        offset=torch.empty(()),
        state2=QuantState(
            torch.empty(-(-blocks // 256)),
            code=torch.empty(256),
            blocksize=256,
            dtype=torch.float32,
        ),
    )
    return weight


def _at_rest(strategy: Any, module: nn.Module) -> Iterator[Tensor]:
    """Yield every tensor that is there between two steps."""
    yield from module.parameters()
    yield from module.buffers()
    state = strategy.state()
    yield from (t for part in state.values() for t in part.values() if isinstance(t, Tensor))
    for parameter in module.parameters():
        if (packed := getattr(parameter, "quant_state", None)) is not None:
            yield from (packed.absmax, packed.code, packed.state2.absmax, packed.state2.code)


def _size(tensor: Tensor) -> int:
    local = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
    return local.numel() * local.element_size()


def _no_batch() -> MicroBatch:
    raise AssertionError("float8 alone asks for a batch")
