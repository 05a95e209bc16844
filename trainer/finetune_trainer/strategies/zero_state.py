"""Convert weights and optimizer state between DeepSpeed's flat shards and parameter-shaped tensors.

`zero` calls it. Each parameter takes three collectives, so no rank ever has more than one whole
tensor beside its shard. All other strategies use the same names and shapes
(docs/decisions/0031-zero-checkpoints.md).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from finetune_trainer.strategies.optimizer import fresh_state
from finetune_trainer.world import World

_MOMENTS = ("exp_avg", "exp_avg_sq")


def create_moments(engine: Any, stage: int) -> None:
    """Create Adam's state, which DeepSpeed otherwise creates at the first step.

    A checkpoint can then be restored before the first step.
    """
    optimizer = engine.optimizer
    if stage < 3:
        for group in optimizer.optimizer.param_groups:
            for flat in group["params"]:
                optimizer.optimizer.state[flat] = fresh_state(flat)
        optimizer._lazy_init_hp_params_optimizer_state()
        return
    for index, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
        is_on_disk = optimizer._swappable_optimizer_subgroup(index)
        if is_on_disk:
            optimizer._optimizer_states_and_gradient_swap_in(index)
        optimizer.optimizer.state[flat] = fresh_state(flat)
        if is_on_disk:
            optimizer._optimizer_states_and_gradient_swap_out(index)


def read(engine: Any, trained: Mapping[str, nn.Parameter], world: World) -> dict[str, Any]:
    """Return copies of fp32 weights, moments and step counts, each sharded by its first dimension.

    Args:
        engine: DeepSpeed's engine.
        trained: Trained parameters by their names in the unwrapped model.
        world: The ranks; with a single rank, tensors are not sharded.
    """
    from deepspeed import utils

    mesh = None
    if world.control_group is not None:
        mesh = DeviceMesh.from_group(world.control_group, "cpu")
    step = _steps(engine)[0].detach().to("cpu", torch.float32)
    model, moments = {}, {}
    for name, parameter in trained.items():
        model[name] = _shard(utils.safe_get_full_fp32_param(parameter), mesh)
        for key in _MOMENTS:
            whole = utils.safe_get_full_optimizer_state(parameter, key)
            moments[f"{name}.{key}"] = _shard(whole, mesh)
        moments[f"{name}.step"] = step.clone()
    state: dict[str, Any] = {"model": model, "optimizer": moments}
    if engine.fp16_enabled():
        scaler = engine.optimizer.loss_scaler
        good_steps = scaler.cur_iter - scaler.last_overflow_iter - 1
        state["scaler"] = {
            "scale": torch.tensor(float(scaler.cur_scale)),
            "good_steps": torch.tensor(float(good_steps % scaler.scale_window)),
        }
    return state


def write(engine: Any, trained: Mapping[str, nn.Parameter], state: Mapping[str, Any]) -> None:
    """Write the state of `read`, filled by a restore, into the shards.

    The forward pass uses a low-precision copy of the fp32 parameter; both are written. The step
    counts correct the moments' bias, and without them resumed losses differ.
    """
    moments = state["optimizer"]
    for name, parameter in trained.items():
        whole = _whole(state["model"][name])
        _set(parameter, whole)
        for key in _MOMENTS:
            _set(parameter, _whole(moments[f"{name}.{key}"]), key)
        _set_live(parameter, whole)
    step = next(value for name, value in moments.items() if name.endswith(".step"))
    for counter in _steps(engine):
        counter.fill_(step.item())
    if engine.fp16_enabled():
        scaler, read_back = engine.optimizer.loss_scaler, state["scaler"]
        scaler.cur_scale = read_back["scale"].item()
        scaler.last_overflow_iter = scaler.cur_iter - 1 - int(read_back["good_steps"].item())


def gather(parameters: Mapping[str, nn.Parameter], *, keep: bool) -> dict[str, Tensor]:
    """Gather parameters into host memory, one at a time, trained parameters in fp32.

    All ranks take part; without `keep`, the result is empty.
    """
    from deepspeed import utils, zero

    gathered = {}
    for name, parameter in parameters.items():
        is_divided = not parameter.requires_grad and hasattr(parameter, "ds_id")
        with zero.GatheredParameters([parameter], enabled=is_divided):
            trained = parameter.requires_grad
            whole = utils.safe_get_full_fp32_param(parameter) if trained else parameter.detach()
            if keep:
                gathered[name] = whole.to("cpu", copy=True)
    return gathered


def _steps(engine: Any) -> list[Tensor]:
    return [state["step"] for state in engine.optimizer.optimizer.state.values()]


def _shard(whole: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Return this rank's rows of a replicated tensor, in host memory."""
    if mesh is None or whole.ndim == 0:
        return whole.detach().to("cpu", copy=True)
    rows = whole.chunk(mesh.size())
    rank = mesh.get_local_rank()
    local = rows[rank] if rank < len(rows) else whole[:0]
    return DTensor.from_local(
        local.detach().to("cpu", copy=True),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _set(parameter: nn.Parameter, whole: Tensor, key: str | None = None) -> None:
    """Write this rank's share of a whole tensor: the fp32 parameter, or its moment `key`."""
    from deepspeed import utils

    if not hasattr(parameter, "ds_id"):
        if key is None:
            utils.safe_set_full_fp32_param(parameter, whole)
        else:
            utils.safe_set_full_optimizer_state(parameter, whole, key)
        return
    # DeepSpeed's setter of whole tensors fails if the number of ranks does not divide the number of
    # elements.
    share = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
    flat = whole.flatten()[share * torch.distributed.get_rank() :][:share]
    local = nn.functional.pad(flat, (0, share - flat.numel()))
    if key is None:
        utils.safe_set_local_fp32_param(parameter, local)
    else:
        utils.safe_set_local_optimizer_state(parameter, local, key)


def _set_live(parameter: nn.Parameter, whole: Tensor) -> None:
    if not hasattr(parameter, "ds_id"):
        parameter.data.copy_(whole)
        return

    from deepspeed import zero

    with zero.GatheredParameters([parameter], modifier_rank=0):
        if torch.distributed.get_rank() == 0:
            parameter.data.copy_(whole)
