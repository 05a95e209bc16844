"""Pinned memory is counted, compared with what node and container have left, and refused."""

from pathlib import Path

import pytest
import torch

from finetune_trainer.errors import ConfigError
from finetune_trainer.memory.host import (
    free_host_memory,
    pinned_size,
    refuse_pinning,
)
from finetune_trainer.sizing.host import pinned_nbytes

GIB = 2**30


def host(folder: Path, *, available: int, files: dict[str, str]) -> tuple[Path, Path]:
    """Write what /proc and /sys/fs/cgroup say; return both folders."""
    proc, cgroup = folder / "proc", folder / "cgroup"
    (cgroup / "memory").mkdir(parents=True)
    proc.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n")
    for name, text in files.items():
        (cgroup / name).write_text(text)
    return proc, cgroup


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, 64 * GIB, id="no cgroup"),
        pytest.param(
            {"memory.max": "max\n", "memory.current": "5", "memory.stat": "inactive_file 1"},
            64 * GIB,
            id="no limit",
        ),
        pytest.param(
            {
                "memory.max": str(32 * GIB),
                "memory.current": str(20 * GIB),
                "memory.stat": f"anon 1\ninactive_file {8 * GIB}",
            },
            20 * GIB,
            id="the limit of the container, files not counted",
        ),
        pytest.param(
            {
                "memory/memory.limit_in_bytes": str(32 * GIB),
                "memory/memory.usage_in_bytes": str(30 * GIB),
                "memory/memory.stat": "total_inactive_file 0",
            },
            2 * GIB,
            id="the first cgroup",
        ),
        pytest.param(
            {
                "memory.max": str(128 * GIB),
                "memory.current": str(GIB),
                "memory.stat": "inactive_file 0",
            },
            64 * GIB,
            id="a node with less than the limit",
        ),
    ],
)
def test_free_memory_is_the_nodes_within_the_containers_limit(
    files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    assert free_host_memory(*host(tmp_path, available=64 * GIB, files=files)) == expected


def test_this_machine_has_free_memory() -> None:
    assert free_host_memory() > 0


def test_what_is_on_the_device_is_counted_as_pinned() -> None:
    state = {
        "model": {"w": torch.zeros(10, device="meta"), "host": torch.zeros(10)},
        "optimizer": {"w.exp_avg": torch.zeros(10, dtype=torch.bfloat16, device="meta")},
        "trainer": {"note": 1},
    }
    assert pinned_size(state, "meta") == 64 + 32, "each tensor takes a power of two"
    assert pinned_size(state) == 0, "on a CPU nothing is pinned"


@pytest.mark.parametrize(
    ("asked", "settings", "taken"),
    [
        pytest.param(0, "", 0, id="nothing"),
        pytest.param(2**28, "", 2**28, id="a power of two"),
        # Of a Qwen 2.5 of 7B: 18,944 x 3,584 in fp32.
        pytest.param(271_581_184, "", 2**29, id="nearly twice as much"),
        pytest.param(
            271_581_184,
            "expandable_segments:True,pinned_max_round_threshold_mb:1",
            271_581_184,
            id="the user's own setting",
        ),
        pytest.param(5, "pinned_max_round_threshold_mb:1", 8, id="below that"),
    ],
)
def test_what_is_pinned_is_what_torch_takes_for_it(asked: int, settings: str, taken: int) -> None:
    assert pinned_nbytes(asked, settings) == taken


def test_a_copy_larger_than_what_is_free_is_refused_with_both_figures() -> None:
    refuse_pinning(GIB, 8, 8 * GIB, "a copy of the checkpoint")
    with pytest.raises(ConfigError) as refused:
        refuse_pinning(GIB, 8, 8 * GIB - 1, "a copy of the checkpoint")
    said = str(refused.value)
    assert said.startswith("spec.resources: a copy of the checkpoint takes 8.0 GiB")
    assert "8 ranks x 1.0 GiB" in said
    assert "8.0 GiB are free" in said
    assert "spec.checkpoint.enabled false" in said
