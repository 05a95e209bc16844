"""The local backend reads the memory of this machine's GPUs, from an `nvidia-smi` of the test."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from finetune_operator.backends.base import BackendContext
from finetune_operator.backends.local.backend import LocalBackend
from finetune_operator.kube.cache import ObjectCache
from finetune_operator.kube.cluster import Cluster
from finetune_operator.planner.catalogue import GpuSize, size_with
from finetune_operator.planner.hardware import expect
from support.api.builders import job
from support.kernel.fake_api import FakeApi
from support.local.fake_nvidia_smi import H100, T4, fake_nvidia_smi

TWO_H100 = replace(
    size_with((81559 - 551) / 1024),
    name="this machine",
    gpu="NVIDIA H100 80GB HBM3",
    gpus=2,
    capability=(9, 0),
)


def sizes(
    folder: Path,
    rows: Sequence[str],
    gpus: int = 1,
    *,
    nvlink: bool = False,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> Sequence[GpuSize]:
    """Return the sizes of a job with so many GPUs, on a machine whose driver shows `rows`."""
    path = fake_nvidia_smi(folder, rows, has_nvlink=nvlink)
    backend = LocalBackend(BackendContext(folder, {"PATH": path, **environ}))
    return backend.gpu_sizes(wanting(gpus))


def wanting(gpus: int, **overrides: Any) -> Any:
    topology = {"gpusPerNode": gpus, "processesPerNode": None}
    return job(topology=topology, **overrides)


def test_the_gpus_of_this_machine_are_a_size(tmp_path: Path) -> None:
    assert sizes(tmp_path, [H100, H100]) == (TWO_H100,)


def test_nvlink_has_to_connect_all_gpus(tmp_path: Path) -> None:
    [found] = sizes(tmp_path, [H100, H100], nvlink=True)
    assert found.has_nvlink
    assert not TWO_H100.has_nvlink


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        pytest.param("1", 1, id="one"),
        pytest.param("0,1,2", 2, id="more than there are"),
    ],
)
def test_only_visible_gpus_count(tmp_path: Path, visible: str, gpus: int) -> None:
    [found] = sizes(tmp_path, [H100, H100], environ={"CUDA_VISIBLE_DEVICES": visible})
    assert found == replace(TWO_H100, gpus=gpus)


def test_the_smallest_gpu_counts_if_a_job_uses_all(tmp_path: Path) -> None:
    [found] = sizes(tmp_path, [H100, T4], 2)
    assert (found.gpus, found.gpu, found.capability) == (2, "Tesla T4", (7, 5))
    assert found.usable_gib == pytest.approx(14.55, abs=0.01)


@pytest.mark.parametrize(
    ("rows", "gpus", "environ"),
    [
        pytest.param([H100], 0, {}, id="a job on the CPU"),
        pytest.param([H100], 1, {"CUDA_VISIBLE_DEVICES": ""}, id="no visible GPU"),
        pytest.param([H100, T4], 1, {}, id="a part of two kinds"),
        pytest.param([H100, H100.replace("81559", "[N/A]")], 2, {}, id="memory unknown"),
        pytest.param([H100.replace("81559", "0")], 1, {}, id="no memory"),
        pytest.param([H100.replace("Disabled", "Enabled")], 1, {}, id="MIG"),
        pytest.param([], 1, {}, id="the driver fails"),
        pytest.param([H100], 1, {"PATH": "/nowhere"}, id="no driver"),
    ],
)
def test_gpus_whose_memory_is_not_known_are_no_size(
    tmp_path: Path, rows: Sequence[str], gpus: int, environ: dict[str, str]
) -> None:
    assert sizes(tmp_path, rows, gpus, environ=environ) == ()


def test_the_gpus_of_an_operators_pod_are_no_size(tmp_path: Path) -> None:
    environ = {"PATH": fake_nvidia_smi(tmp_path, [H100])}
    context = BackendContext(tmp_path, environ, cluster=Cluster(FakeApi(), ObjectCache))
    assert LocalBackend(context).gpu_sizes(wanting(1)) == ()


def test_a_job_that_does_not_fit_here_names_the_cheapest_change(tmp_path: Path) -> None:
    llama = {"source": "hf://meta-llama/Llama-3.1-8B"}
    large = wanting(1, model=llama, training__packing=True)
    found = expect(large, sizes(tmp_path, [T4]))
    assert found is not None
    assert found.reason == "DoesNotFit"
    assert "the job does not fit on this machine: it needs " in found.message
    assert "of 14.6 GiB per GPU; the cheapest change that fits is " in found.message
