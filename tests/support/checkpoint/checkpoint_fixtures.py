"""A small state, a store around it, and a stand-in for training that can be killed and resumed."""

import faulthandler
import gc
import json
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from finetune_trainer.checkpoint.commit import Fingerprint, ledger
from finetune_trainer.checkpoint.start import job_of_checkpoints
from finetune_trainer.checkpoint.store import CheckpointStore
from finetune_trainer.claims.enter import Pace, Wanted
from finetune_trainer.claims.fence import Fence, take
from finetune_trainer.claims.names import CLAIMS
from finetune_trainer.config import CheckpointConfig, JobRef
from finetune_trainer.peer_objects import guard_object_collectives
from support.launch.warm_processes import Forks, beside_deepspeed, forkserver

State = dict[str, Any]
TIMEOUT_SECONDS = 240
JOB = JobRef(name="tiny", uid="uid-1")
FINGERPRINT = Fingerprint(model="a model", method="lora", data="rows", order="seed 1")


def make_state(step: int, *, size: int = 16) -> State:
    """Return tensors that depend on `step` alone, of several types, and plain values."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {
            "layers.0.weight": torch.randn(size, size, generator=generator),
            "layers.0.bias": torch.randn(size, generator=generator).to(torch.bfloat16),
        },
        "optimizer": {
            "layers.0.weight.exp_avg": torch.randn(size, size, generator=generator),
            "layers.0.weight.step": torch.tensor(float(step)),
        },
        "trainer": {"step": step, "answers": [["Why?", None]]},
    }


def open_store(folder: Path, warnings: list[str] | None = None, **changes: Any) -> CheckpointStore:
    """Return the store of a single process; keyword arguments go to the store or its config."""
    warn = (warnings if warnings is not None else []).append
    own: dict[str, Any] = {"rank": 0, "world_size": 1, "group": None, "warn": warn}
    own |= {"job": JOB, "fingerprint": FINGERPRINT, "costs": None, "shards": None}
    own |= {"ranks_on_node": 1, "held_out": None}
    arguments = {name: changes.pop(name, value) for name, value in own.items()}
    take_over = changes.pop("take_over", False)
    is_first = arguments["rank"] == 0
    fence = claimed(folder, arguments["job"], take_over=take_over) if is_first else None
    return CheckpointStore(
        CheckpointConfig(dir=str(folder), **changes),
        clock=lambda: 1000.0,
        fence=fence,
        **arguments,
    )


def claimed(folder: Path, job: JobRef = JOB, *, take_over: bool = False) -> Fence:
    """Claim a folder for checkpoints as rank 0 does before it trains."""
    wanted = Wanted(folder, "spec.checkpoint.uri", job, take_over, left_by=job_of_checkpoints)
    return take([wanted], lambda _: Pace())


def step_path(root: Path, step: int) -> Path:
    """Return the folder of the committed checkpoint of `step` on the course of training."""
    (path,) = (Path(ref.path) for ref in ledger(root) if ref.step == step)
    return path


def steps_in(root: Path) -> list[str]:
    """Return the names in `root` without the claims: `step-2` for a folder of step 2."""
    names = (path.name for path in root.iterdir() if path.name != CLAIMS)
    return sorted(name.partition(".")[0] for name in names)


def tensors_differ(one: State, other: State) -> list[str]:
    """Return the names of tensors that are not the same bit for bit."""
    return [
        f"{section}.{name}"
        for section in ("model", "optimizer")
        for name, tensor in one[section].items()
        if tensor.dtype != other[section][name].dtype
        or not torch.equal(tensor, other[section][name])
    ]


def flip_a_bit(path: Path) -> None:
    """Damage a file in its middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def train_and_save(folder: Path, report: Path, steps: int = 8) -> None:
    """Stand in for training: change the state each step, save every second, resume at start.

    The final values and the step that was resumed from go to `report` as JSON.
    """
    store = open_store(folder, every_steps=2, keep=1)
    state = make_state(0)
    manifest = store.restore(state)
    first = state["trainer"]["step"]
    for step in range(first + 1, steps + 1):
        for section in ("model", "optimizer"):
            for tensor in state[section].values():
                tensor.mul_(1.5).sub_(step)
        state["trainer"]["step"] = step
        if store.cadence.is_due(step):
            store.save(step, state)
    store.wait()
    values = {name: tensor.tolist() for name, tensor in state["model"].items()}
    resumed = manifest.step if manifest else None
    report.write_text(json.dumps({"resumed": resumed, "values": values}))


def run_processes(
    work: Callable[..., None],
    *arguments: Any,
    world_size: int = 1,
    environ: Mapping[str, str] | None = None,
    max_file_bytes: Mapping[int, int] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    deepspeed: bool = False,
) -> list[int | None]:
    """Call `work(*arguments)` in new processes, and return their exit codes by rank.

    With more than one, each is connected with the others over gloo and `work` gets the process
    group first. `max_file_bytes` limits how long a file a rank may write; with `deepspeed` the
    processes have imported it.
    """
    limits = max_file_bytes or {}
    meeting_point = f"{arguments[0]}.rendezvous-{world_size}"
    ranks = [
        partial(
            _enter,
            work,
            arguments,
            rank,
            world_size,
            meeting_point,
            environ=dict(environ or {}),
            max_file_bytes=limits.get(rank),
            timeout_seconds=timeout_seconds,
        )
        for rank in range(world_size)
    ]
    run = partial(_run_ranks, ranks, timeout_seconds)
    codes = beside_deepspeed(run) if deepspeed else run(forkserver())
    Path(meeting_point).unlink(missing_ok=True)
    return codes


def _run_ranks(
    ranks: Sequence[Callable[[], None]], timeout_seconds: float, context: Forks
) -> list[int | None]:
    processes = [context.Process(target=rank) for rank in ranks]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout_seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def _enter(
    work: Callable[..., None],
    arguments: tuple[Any, ...],
    rank: int,
    world_size: int,
    meeting_point: str,
    *,
    environ: dict[str, str],
    max_file_bytes: int | None,
    timeout_seconds: float,
) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(0.9 * timeout_seconds)  # before it is killed
    gc.freeze()  # else each collection looks through all that was imported before the fork
    os.environ.update(environ, RANK=str(rank))
    torch.set_num_threads(1)
    if max_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    if world_size == 1:
        work(*arguments)
        return
    import torch.distributed as dist

    guard_object_collectives()
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=world_size
    )
    work(dist.new_group(backend="gloo"), *arguments)
    dist.barrier()
    dist.destroy_process_group()
