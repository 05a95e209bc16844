"""ZeRO stages 1, 2 and 3 with DeepSpeed's engine (arXiv:1910.02054).

Only this module starts the engine; `zero_state` reads and writes the engine's shards. Users do not
configure DeepSpeed itself: every setting follows from `TrainConfig`.
"""

import fcntl
import importlib.util
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finetune_trainer.config import TrainConfig
from finetune_trainer.errors import ConfigError, TrainerError, WorldSizeError
from finetune_trainer.model.loss import CausalLoss
from finetune_trainer.sizing.zero import MOST_IN_BUCKET
from finetune_trainer.strategies import zero_state
from finetune_trainer.strategies.optimizer import make_adamw
from finetune_trainer.strategies.parallelize import parallelize
from finetune_trainer.strategies.skeleton import empty_copy, filled
from finetune_trainer.strategies.zero_loading import partition_weights
from finetune_trainer.world import World, set_group_timeouts

_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class ZeroStrategy:
    """A DeepSpeed engine around the loss module."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self._deepspeed = _start_deepspeed(config, world)
        self._config = config
        self._world = world
        self._stage = int(config.strategy.type.removeprefix("zero"))
        self._module: CausalLoss
        self._engine: Any
        # Stage 3 has no unsharded weights, and bf16 and fp16 have no fp32 ones: both are gathered.
        self._is_gathered = self._stage == 3 or config.training.precision != "fp32"
        self._skeleton: nn.Module | None = None

    def prepare(self, module: CausalLoss, warn: Callable[[str], None] = warnings.warn) -> None:
        """Let DeepSpeed shard the module, and verify the result against the configuration.

        Stages 1 and 2 need the whole model on every rank; stage 3 needs it on rank 0.

        Raises:
            TrainerError: the engine does not match the configuration.
            WorldSizeError: the engine was built over another number of ranks.
        """
        largest = max(p.numel() for p in module.parameters())
        self._module = module
        num_trained = sum(p.numel() for p in self._trained().values())
        settings = deepspeed_config(
            self._config, largest_parameter=largest, num_trained=num_trained
        )
        if self._is_gathered and self._world.is_main:
            self._skeleton = empty_copy(module.model, torch.float32)  # of the engine's shards

        def shard(whole: CausalLoss, _: object) -> Any:
            with redirect_stdout(None):  # it prints the memory of each group of weights
                if self._stage == 3:
                    dtype = _PRECISIONS[self._config.training.precision]
                    partition_weights(whole, settings, dtype, self._world)
                engine, *_ = self._deepspeed.initialize(
                    model=whole,
                    optimizer=make_adamw(self._trained(), self._config.training),
                    config=settings,
                    dist_init_required=False,
                )
            return engine

        # DeepSpeed shards over the default process group and accepts no mesh.
        self._engine = parallelize(module, None, self._config, shard, warn)
        set_group_timeouts(self._config, self._engine.data_parallel_group)
        self._verify()
        if self._engine.fp16_enabled():  # the loop stops a run whose steps are all skipped
            self._engine.optimizer.loss_scaler.raise_error_at_min_scale = False
        zero_state.create_moments(self._engine, self._stage)

    def forward(self, inputs: dict[str, Tensor], *, is_last: bool) -> Tensor:
        """Run the forward pass; stage 1 reduces gradients after the last micro-batch."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        loss_sum: Tensor = self._engine(**inputs)
        return loss_sum

    def backward(self, loss_sum: Tensor, *, scale: float) -> None:
        """Run the backward pass; stages 2 and 3 reduce the gradients of every micro-batch."""
        self._engine.backward(loss_sum * scale, scale_wrt_gas=False)

    def step(self, learning_rate: float, max_norm: float) -> Tensor:
        """Clip and update; a gradient that is not finite on any rank skips the update.

        DeepSpeed reads the norm on the host, one host sync per step.
        """
        optimizer = self._engine.optimizer
        optimizer.clip_grad = max_norm
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        norm = self._engine.get_global_grad_norm()  # infinite when the step was skipped
        return torch.as_tensor(norm, dtype=torch.float32, device=self._world.device)

    def evaluate(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the summed loss of one batch; a collective in stage 3."""
        with torch.no_grad():
            loss_sum: Tensor = self._module(**inputs)
        return loss_sum

    def state(self) -> dict[str, Any]:
        """Return copies of the fp32 weights, moments and step counts; a collective."""
        return zero_state.read(self._engine, self._trained(), self._world)

    def load_state(self, state: dict[str, Any]) -> None:
        """Write the restored values into the engine's shards; a collective."""
        zero_state.write(self._engine, self._trained(), state)

    def whole_model(self, *, trained_only: bool = False) -> nn.Module | None:
        """Return the model on rank 0, trained parameters in fp32; a copy is in host memory."""
        if not self._is_gathered:
            return self.model if self._world.is_main else None
        parameters = self._trained() if trained_only else dict(self.model.named_parameters())
        gathered = zero_state.gather(parameters, keep=self._world.is_main)
        if self._skeleton is None:
            return None
        return filled(self._skeleton, gathered).train(self.model.training)

    @property
    def model(self) -> nn.Module:
        """The unwrapped transformers or peft model; in stage 3 without unsharded weights."""
        return self._module.model

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def _verify(self) -> None:
        engine, config = self._engine, self._config
        if engine.dp_world_size != config.world.world_size:
            raise WorldSizeError(
                f"DeepSpeed was built over {engine.dp_world_size} ranks, not "
                f"{config.world.world_size}; check the launcher"
            )
        built = (engine.zero_optimization_stage(), engine.get_data_types()[0])
        expected = (self._stage, _PRECISIONS[config.training.precision])
        is_sharded = any(hasattr(p, "ds_id") for p in self._module.parameters())
        if built != expected or is_sharded != (self._stage == 3):
            raise TrainerError(
                f"DeepSpeed built stage {built[0]} in {built[1]} (parameters sharded: "
                f"{is_sharded}), not stage {expected[0]} in {expected[1]}; this version of "
                "DeepSpeed cannot be used"
            )


def deepspeed_config(
    config: TrainConfig, *, largest_parameter: int = 0, num_trained: int = MOST_IN_BUCKET
) -> dict[str, Any]:
    """Return the engine's JSON for `config`; every setting is explicit.

    The loop accumulates gradients itself, so the engine's accumulation is 1: otherwise the engine
    would divide by the number of micro-batches.

    Args:
        config: Configuration of the run.
        largest_parameter: Elements of the largest parameter; sizes the buffers of offload nvme.
        num_trained: Elements of all trained parameters. DeepSpeed allocates the whole bucket of
            gradients, up to twice 2 GB in fp32, whatever is trained.
    """
    training, world = config.training, config.world
    zero: dict[str, Any] = {
        "stage": int(config.strategy.type.removeprefix("zero")),
        "overlap_comm": world.device == "cuda",
        "contiguous_gradients": True,
        "reduce_bucket_size": min(num_trained, MOST_IN_BUCKET),
        **_offload(config, largest_parameter),
    }
    is_low_precision = training.precision != "fp32"
    return {
        "train_batch_size": training.micro_batch_size * world.world_size,
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": training.max_grad_norm,
        "zero_optimization": zero,
        # The optimizer is torch's, whose fused kernel also exists for CPUs: no compilation needed.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": training.precision == "bf16"},
        "fp16": {
            "enabled": training.precision == "fp16",
            "loss_scale": 0,  # dynamic, with the values of torch's own GradScaler
            "initial_scale_power": 16,
            "loss_scale_window": 2000,
            "hysteresis": 1,
        },
        # Dtype of sums of many small values, over micro-batches and over ranks.
        **({"data_types": {"grad_accum_dtype": "fp32"}} if is_low_precision else {}),
        "communication_data_type": "fp32",
        "timers": {"throughput": {"enabled": False}},  # it would sync at each step
    }


def _offload(config: TrainConfig, largest_parameter: int) -> dict[str, Any]:
    strategy = config.strategy
    if strategy.offload == "none":
        return {}
    if strategy.offload == "optimizer":
        return {"offload_optimizer": {"device": "cpu"}}
    if strategy.offload == "cpu":
        return {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    place = {"device": "nvme", "nvme_path": strategy.nvme_path}
    share = -(-largest_parameter // config.world.world_size)
    return {
        "offload_optimizer": dict(place),
        "offload_param": {**place, "buffer_size": max(share, 1_000_000)},
    }


def refuse_unsupported(config: TrainConfig) -> None:
    """Refuse settings that DeepSpeed does not support, or would silently apply wrongly."""
    kind, training = config.strategy.type, config.training
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            f"spec.strategy.type {kind} needs DeepSpeed, which is not installed; "
            "pip install finetune-operator[deepspeed], or use fsdp"
        )
    if training.precision == "fp64":
        raise ConfigError(
            f"spec.training.precision fp64 has no effect with spec.strategy.type {kind}, whose "
            "optimizer computes in fp32; use ddp or fsdp"
        )
    if kind == "zero3" and config.method.type == "qlora":
        raise ConfigError(
            "spec.strategy.type zero3 cannot shard the quantised weights of spec.method.type "
            "qlora; use zero1, zero2 or ddp, or spec.method.type lora"
        )


def _start_deepspeed(config: TrainConfig, world: World) -> Any:
    """Import DeepSpeed with the existing process group, and reduce its log output."""
    import torch.distributed as dist

    os.environ["LOCAL_RANK"] = str(world.local_rank)  # mpirun does not set it
    # DeepSpeed 0.19 still calls collectives by names that torch 2.13 deprecates.
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning
    )
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    if not dist.is_initialized():  # DeepSpeed needs a process group even for one process
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)

    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Otherwise it compiles an operator for collectives between CPUs, 45 s at the first start.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    _refuse_on_this_machine(config)
    return deepspeed


def _refuse_on_this_machine(config: TrainConfig) -> None:
    """Refuse settings that this machine does not support before the first step."""
    from deepspeed.accelerator import get_accelerator

    if config.training.precision == "fp16" and not get_accelerator().is_fp16_supported():
        raise ConfigError(
            "spec.training.precision fp16: DeepSpeed finds no fp16 arithmetic on this device; "
            "use bf16 or fp32"
        )
    if config.strategy.offload != "nvme":
        return

    path = str(config.strategy.nvme_path)
    try:
        os.makedirs(path, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ConfigError(
            f"spec.strategy.nvmePath {path} is not writable ({error.strerror}); use a folder that "
            "this process can write"
        ) from error
    try:
        _load_async_io()
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            "spec.strategy.offload nvme: DeepSpeed cannot build its asynchronous input and output "
            f"({str(error).splitlines()[0]}); install libaio-dev, g++ and ninja, or use offload cpu"
        ) from error


def _load_async_io() -> None:
    """Load DeepSpeed's extension, compiled in minutes at first use; one process at a time.

    PyTorch's build lock is a file that outlives a killed builder, and later builders would wait
    for it indefinitely. The kernel releases our lock with its holder, so the holder may delete that
    file.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    root.mkdir(parents=True, exist_ok=True)
    with (root / "async_io.flock").open("w") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)
        for stale in root.rglob("async_io/lock"):
            stale.unlink()
        AsyncIOBuilder().load(verbose=False)
