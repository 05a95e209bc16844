"""Where the models of `ftctl chat` are loaded, by the bytes of their weights."""

from pathlib import Path

import pytest

from finetune_trainer.chat.placement import Place, Weights, choose_place, free_memory
from finetune_trainer.errors import ConfigError

MILLION = 1_000_000


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A weight file with a million numbers in bf16 and 16 bytes of other data."""
    import torch
    from safetensors.torch import save_file

    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    weight = torch.zeros(1000, 1000, dtype=torch.bfloat16)
    save_file({"weight": weight, "flags": torch.zeros(16, dtype=torch.uint8)}, path)
    return path


@pytest.mark.parametrize(
    ("precision", "quantization", "expected"),
    [
        pytest.param("bf16", "none", 2 * MILLION + 16, id="bf16"),
        pytest.param("fp32", "none", 4 * MILLION + 16, id="fp32"),
        pytest.param("bf16", "nf4", 600_016, id="nf4"),
    ],
)
def test_bytes_follow_from_the_headers_of_the_files(
    file: Path, precision: str, quantization: str, expected: int
) -> None:
    assert Weights([file], quantization).num_bytes(precision) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("precision", "gpu", "host", "expected"),
    [
        pytest.param(None, None, 9, Place("cpu", "fp32"), id="a CPU"),
        pytest.param("bf16", None, 9, Place("cpu", "bf16"), id="the precision of the run"),
        pytest.param(None, 9, 9, Place("cuda", "bf16"), id="a GPU"),
        pytest.param("fp32", 3, 9, Place("cuda", "bf16"), id="a small GPU"),
        pytest.param("fp32", 1, 9, Place("cpu", "fp32"), id="a GPU that is full"),
        pytest.param(None, None, 3, Place("cpu", "bf16"), id="a small host"),
    ],
)
def test_the_first_place_with_room_is_taken(
    file: Path, precision: str | None, gpu: int | None, host: int, expected: Place
) -> None:
    place = choose_place(
        [Weights([file])],
        precision,  # type: ignore[arg-type]
        gpu_bytes=None if gpu is None else gpu * MILLION,
        host_bytes=host * MILLION,
    )
    assert place == expected


def test_too_little_memory_is_refused_before_anything_is_loaded(file: Path) -> None:
    two = [Weights([file])] * 2
    with pytest.raises(ConfigError, match=r"need 0\.0 GiB in bf16, and 0\.0 GiB .* --only trained"):
        choose_place(two, None, gpu_bytes=None, host_bytes=MILLION)
    with pytest.raises(ConfigError, match=r"use a machine with more memory$"):
        choose_place(two[:1], None, gpu_bytes=None, host_bytes=MILLION)
    assert free_memory() > MILLION
