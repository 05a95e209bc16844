"""Compare what a checkpoint costs the loop: ours against a plain `torch.save` of the same state.

    python saving.py FOLDER MIB ROUNDS [DEVICE]

Prints a JSON list of ratios, one a round: seconds blocked by ours / seconds of torch.save. Both
write to the same disk; torch.save's file is synced, as a checkpoint that a crash may not undo.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from finetune_trainer.checkpoint.commit import Fingerprint
from finetune_trainer.checkpoint.start import job_of_checkpoints
from finetune_trainer.checkpoint.store import CheckpointStore
from finetune_trainer.claims.enter import Pace, Wanted
from finetune_trainer.claims.fence import take
from finetune_trainer.config import CheckpointConfig, JobRef

TENSORS_PER_SECTION = 32


def make_state(mib: int, device: str) -> dict[str, Any]:
    """Return weights and two moments of each on the device, `mib` MiB in all."""
    size = mib * 2**20 // 4 // (3 * TENSORS_PER_SECTION)
    names = [f"layer.{index}" for index in range(TENSORS_PER_SECTION)]
    moments = [f"{name}.{key}" for name in names for key in ("m", "v")]
    parts = {"model": names, "optimizer": moments}
    return {
        part: {name: torch.randn(size, device=device) for name in inside}
        for part, inside in parts.items()
    }


def seconds_of_torch_save(state: dict[str, Any], path: Path) -> float:
    """Return the seconds until the file is on disk."""
    began = time.perf_counter()
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    folder, mib, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    state = make_state(mib, sys.argv[4] if len(sys.argv) > 4 else "cpu")
    place, job = folder / "checkpoints", JobRef(name="bench", uid="bench")
    wanted = Wanted(place, "spec.checkpoint.uri", job, take_over=False, left_by=job_of_checkpoints)
    store = CheckpointStore(
        CheckpointConfig(dir=str(place), keep=1),
        rank=0,
        world_size=1,
        group=None,
        job=job,
        fingerprint=Fingerprint(model="m", method="m", data="d", order="o"),
        fence=take([wanted], lambda _: Pace()),
        warn=print,
    )
    store.restore(state)
    ratios = []
    for step in range(1, rounds + 1):
        blocked = store.save(step, state)
        store.wait()
        ratios.append(blocked / seconds_of_torch_save(state, folder / "plain.pt"))
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
