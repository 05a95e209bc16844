"""Under FSDP2 one rank reads the model; the others know its shape and nothing more."""

from pathlib import Path

import pytest
import torch

from finetune_trainer.model.load import load_device, load_model
from support.data.text_fixtures import tiny_model
from support.launch.launches import train_config

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"strategy": {"type": "ddp"}}, [CPU, CPU], id="ddp"),
        pytest.param({"strategy": {"type": "fsdp"}}, [CPU, META], id="fsdp"),
        pytest.param({"strategy": {"type": "zero3"}}, [CPU, META], id="zero3"),
        pytest.param({"strategy": {"type": "zero2"}}, [CPU, CPU], id="zero2"),
        pytest.param(
            {
                "strategy": {"type": "fsdp"},
                "method": {"type": "qlora", "lora": {}, "quantization": "nf4"},
            },
            [CPU, META],
            id="quantised",
        ),
        pytest.param(
            {
                "strategy": {"type": "fsdp"},
                "method": {"type": "qlora", "lora": {"dora": True}, "quantization": "nf4"},
            },
            [CPU, CPU],
            id="DoRA measures quantised weights",
        ),
    ],
)
def test_who_reads_the_weights(tmp_path: Path, changes, expected) -> None:
    config = train_config(tmp_path, **changes)
    assert [load_device(config, rank, CPU) for rank in range(2)] == expected


def test_a_model_without_weights_has_the_parameters_and_buffers_of_the_real_one(
    tmp_path: Path,
) -> None:
    tiny_model(tmp_path / "model")
    config = train_config(tmp_path, strategy={"type": "fsdp"})
    whole, empty = load_model(config, CPU), load_model(config, META)
    assert all(parameter.is_meta for parameter in empty.parameters())
    shapes = [
        {name: (p.shape, p.dtype) for name, p in model.named_parameters()}
        for model in (whole, empty)
    ]
    assert shapes[0] == shapes[1]
    buffers = dict(empty.named_buffers())
    assert buffers.keys() == dict(whole.named_buffers()).keys()
    for name, buffer in whole.named_buffers():
        assert torch.equal(buffer, buffers[name])
