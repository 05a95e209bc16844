"""Which layers FSDP gathers while another one computes."""

from dataclasses import dataclass
from typing import Any, cast

from torch.distributed.fsdp import FSDPModule

from finetune_trainer.strategies.fsdp_groups import set_prefetch


@dataclass
class Layer:
    """Remembers what it is told as FSDP's own module does."""

    name: int
    forward: list[int] | None = None
    backward: list[int] | None = None

    def set_modules_to_forward_prefetch(self, layers: list["Layer"]) -> None:
        self.forward = [layer.name for layer in layers]

    def set_modules_to_backward_prefetch(self, layers: list["Layer"]) -> None:
        self.backward = [layer.name for layer in layers]


def gathered(count: int) -> list[Any]:
    layers = [Layer(number) for number in range(4)]
    set_prefetch(cast("list[FSDPModule]", layers), count)
    return [(layer.forward, layer.backward) for layer in layers]


def test_the_next_layers_of_either_pass_are_gathered_ahead() -> None:
    assert gathered(2) == [([1, 2], []), ([2, 3], [0]), ([3], [1, 0]), ([], [2, 1])]


def test_torch_chooses_by_itself_without_a_number() -> None:
    assert gathered(0) == [(None, None)] * 4
