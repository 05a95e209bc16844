"""Jobs that require RDMA, on ranks whose NCCL uses other transports."""

from pathlib import Path

import pytest
import torch

from finetune_trainer.errors import ConfigError
from finetune_trainer.interconnect import check_transport, refuse_sockets
from finetune_trainer.telemetry import Telemetry
from finetune_trainer.telemetry.collectives.transport import Transports
from finetune_trainer.world import World
from support.launch.launches import train_config
from support.telemetry import nccl_logs

INFINIBAND = Transports.of_log(nccl_logs.INFINIBAND)
IN_NODE = Transports.of_log(nccl_logs.OLD_SHARED_MEMORY)
SOCKETS = Transports.of_log(nccl_logs.SOCKETS)
UNKNOWN = Transports()


def test_a_new_run_over_sockets_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"spec\.topology\.rdma required") as refused:
        refuse_sockets([INFINIBAND, IN_NODE, SOCKETS, SOCKETS], is_new=True)
    message = str(refused.value)
    assert "NET/Socket) on 2 of 4 rank(s), first on rank 2" in message
    for word in ("RDMA device plugin", "resources.rdma", "NCCL_IB_DISABLE"):
        assert word in message


def test_a_run_that_resumes_over_sockets_continues_with_a_warning() -> None:
    warning = refuse_sockets([INFINIBAND, SOCKETS], is_new=False) or ""
    assert "NET/Socket) on 1 of 2 rank(s), first on rank 1" in warning
    assert warning.endswith("Training resumes over sockets")


@pytest.mark.parametrize("is_new", [True, False])
def test_a_run_without_sockets_passes(is_new: bool) -> None:
    assert refuse_sockets([INFINIBAND, IN_NODE], is_new=is_new) is None


@pytest.mark.parametrize("is_new", [True, False])
def test_an_unknown_transport_is_a_warning(is_new: bool) -> None:
    warning = refuse_sockets([INFINIBAND, UNKNOWN], is_new=is_new) or ""
    assert "is not checked: the transport of 1 of 2 rank(s) is not known" in warning
    assert "NCCL_DEBUG" in warning


def test_sockets_of_one_rank_count_although_others_are_unknown() -> None:
    with pytest.raises(ConfigError):
        refuse_sockets([UNKNOWN, SOCKETS], is_new=True)


def test_a_single_rank_has_no_transport(tmp_path: Path) -> None:
    config = train_config(tmp_path, world={"nproc_per_node": 1, "rdma_required": True})
    telemetry = Telemetry(config, rank=0, world_size=1)
    alone = World(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
    check_transport(config, alone, telemetry, is_new=True)
    telemetry.close()
    assert telemetry.progress.transport is None
    assert telemetry.progress.warnings == ()
