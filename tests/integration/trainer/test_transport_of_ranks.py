"""Two real processes with logs of NCCL: both see what either uses, and leave together."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.telemetry.collectives.transport import ENV_LOG
from support.launch.launches import clean_environment, free_port, train_config
from support.telemetry import nccl_logs

CHECK = """
import json, sys
from pathlib import Path
from finetune_trainer.config import TrainConfig
from finetune_trainer.control import leave
from finetune_trainer.errors import ConfigError
from finetune_trainer.interconnect import check_transport
from finetune_trainer.telemetry import Telemetry
from finetune_trainer.world import barrier, open_world
config = TrainConfig.read(Path(sys.argv[1]))
with open_world(config) as world:
    telemetry = Telemetry(config, rank=world.rank, world_size=2)
    refusal = None
    try:
        check_transport(config, world, telemetry, is_new=sys.argv[2] == "new")
    except ConfigError as error:
        refusal = str(error)
    barrier(world)
    telemetry.close()
progress = telemetry.progress
print(json.dumps([refusal, progress.transport, progress.warnings]))
leave(0)
"""


def checked(folder: Path, logs: tuple[bytes | None, ...], start: str) -> list[list[Any]]:
    """Return refusal, transport of the run and warnings, of each of two ranks."""
    path = folder / "config.json"
    path.write_text(train_config(folder, world={"rdma_required": True}).to_json())
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank, log in enumerate(logs):
        environ = {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        if log is not None:
            (folder / f"{rank}.log").write_bytes(log)
            environ[ENV_LOG] = str(folder / f"{rank}.log")
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", CHECK, str(path), start],
                env=clean_environment(**environ),
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [json.loads(output) for output in outputs]


def test_sockets_of_one_rank_end_a_new_run_on_all(tmp_path: Path) -> None:
    found = checked(tmp_path, (nccl_logs.INFINIBAND, nccl_logs.SOCKETS), "new")
    assert [transport for _, transport, _ in found] == ["NET/IB,NET/Socket,P2P"] * 2
    refusals = {refusal for refusal, _, _ in found}
    assert len(refusals) == 1, "every rank raises the same error"
    assert "on 1 of 2 rank(s), first on rank 1" in refusals.pop()
    assert not list(tmp_path.glob("*.log")), "the logs are deleted"


@pytest.mark.parametrize(
    ("logs", "start", "warning"),
    [
        pytest.param(
            (nccl_logs.INFINIBAND, nccl_logs.SOCKETS),
            "resumed",
            "Training resumes over sockets",
            id="sockets after a checkpoint",
        ),
        pytest.param((nccl_logs.INFINIBAND, None), "new", "is not checked", id="unknown on a rank"),
    ],
)
def test_rank_0_warns_where_a_run_continues(
    tmp_path: Path, logs: tuple[bytes | None, ...], start: str, warning: str
) -> None:
    main, other = checked(tmp_path, logs, start)
    assert (main[0], other[0]) == (None, None)
    assert [warning in one for one in main[2]] == [True]
    assert other[2] == []
