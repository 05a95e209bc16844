"""A run that is to compute the same bits takes kernels that can, and names those that cannot."""

from collections.abc import Iterator

import pytest
import torch

from finetune_trainer.determinism import deterministic
from finetune_trainer.errors import ConfigError


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    was = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(was)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.backends.cuda.enable_cudnn_sdp(True)


def without_a_deterministic_kernel() -> None:
    torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))  # which of the two stays?


def test_a_kernel_that_cannot_be_deterministic_is_refused_by_field() -> None:
    with (
        pytest.raises(
            ConfigError, match=r"^spec\.training\.deterministic is not .* put_ .*; set it"
        ),
        deterministic(is_asked=True),
    ):
        without_a_deterministic_kernel()


def test_any_kernel_serves_where_it_is_not_asked_for() -> None:
    with deterministic(is_asked=False):
        without_a_deterministic_kernel()


def test_attention_without_a_deterministic_backward_pass_is_left_out() -> None:
    with deterministic(is_asked=True):
        assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.math_sdp_enabled()
        assert not torch.backends.cuda.mem_efficient_sdp_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_another_fault_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="size"), deterministic(is_asked=True):
        torch.zeros(2) + torch.zeros(3)
