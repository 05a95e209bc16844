"""Read the transports from logs of NCCL, and publish them."""

import json
from pathlib import Path

import pytest

from finetune_trainer.telemetry import Gpu, GpuMemory, Telemetry
from finetune_trainer.telemetry.collectives.transport import (
    ENV_LOG,
    Transports,
    delete_log,
    take_log,
)
from finetune_trainer.telemetry.node.node_ranks import NodeRanks
from finetune_trainer.telemetry.node.page import RankCollector
from finetune_trainer.telemetry.shared import NodePage, Shared
from support.launch.journals import journal_in
from support.launch.launches import train_config
from support.telemetry import nccl_logs
from support.telemetry.node_pages import read_series

CONNECTION = b"h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via "


@pytest.mark.parametrize(
    ("log", "names", "has_gpu_direct"),
    [
        pytest.param(nccl_logs.OLD_SHARED_MEMORY, ("SHM", "P2P"), False, id="one node, 2.18"),
        pytest.param(nccl_logs.INFINIBAND, ("NET/IB", "P2P"), True, id="InfiniBand, 2.21"),
        pytest.param(nccl_logs.HPCX, ("NET/IBext_v9",), False, id="plugin of HPC-X, 2.23"),
        pytest.param(nccl_logs.SOCKETS, ("NET/Socket", "P2P"), False, id="sockets, 2.27"),
        pytest.param(nccl_logs.PLUGIN, ("NET/AWS Libfabric", "P2P"), True, id="plugin, 2.27"),
        pytest.param(nccl_logs.NOT_CONNECTED, (), False, id="found but not used"),
        pytest.param(b"", (), False, id="empty"),
        pytest.param(
            nccl_logs.SOCKETS + nccl_logs.INFINIBAND + nccl_logs.OLD_SHARED_MEMORY,
            ("NET/IB", "NET/Socket", "SHM", "P2P"),
            True,
            id="most distant first",
        ),
    ],
)
def test_only_connections_count(log: bytes, names: tuple[str, ...], has_gpu_direct: bool) -> None:
    assert Transports.of_log(log) == Transports(names, has_gpu_direct)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(CONNECTION + b"NET/Sock", id="cut within the name"),
        pytest.param(CONNECTION + b"NET/Socket/", id="cut before the device"),
        pytest.param(CONNECTION + b"P2P", id="cut after the name"),
        pytest.param(CONNECTION + b"NET/" + b"x" * 100 + b"/0\n", id="long name"),
        pytest.param(CONNECTION + b'NET/a",b="/0\n', id="name with quotes"),
        pytest.param(CONNECTION + b"NET/\xff\xfe\x00/0\n", id="name that is not ASCII"),
        pytest.param(CONNECTION + b"CARRIER PIGEON/0\n", id="unknown transport"),
        pytest.param(b"h:1:2 [0] NCCL INFO could go via NET/IB/0\n", id="other text"),
        pytest.param(b"Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0\n", id="not of NCCL"),
        pytest.param(b"\x00" * 10_000, id="zeros"),
    ],
)
def test_unreadable_lines_do_not_hide_connections(line: bytes) -> None:
    assert Transports.of_log(line) == Transports()
    found = Transports.of_log(line + b"\n" + nccl_logs.SOCKETS)
    assert found.names == ("NET/Socket", "P2P")


def test_a_log_with_many_networks_yields_a_short_label() -> None:
    log = b"".join(CONNECTION + b"NET/net%d/0\n" % n for n in range(1000))
    assert len(str(Transports.of_log(log))) < 100


def test_transports_of_all_ranks_are_the_union() -> None:
    logs = (nccl_logs.OLD_SHARED_MEMORY, nccl_logs.INFINIBAND, b"")
    together = Transports.of_all([Transports.of_log(log) for log in logs])
    assert together == Transports(("NET/IB", "SHM", "P2P"), has_gpu_direct=True)
    assert str(together) == "NET/IB,SHM,P2P"


def test_a_log_is_read_once_and_deleted(tmp_path: Path) -> None:
    path = tmp_path / "nccl.log"
    path.write_bytes(nccl_logs.INFINIBAND)
    environ = {ENV_LOG: str(path)}
    assert take_log(environ).names == ("NET/IB", "P2P")
    assert not path.exists()
    assert take_log(environ) == Transports()


def test_only_the_start_of_a_huge_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "nccl.log"
    with path.open("wb") as file:
        file.write(nccl_logs.SOCKETS)
        file.truncate(2**40)  # sparse
        file.seek(2**39)
        file.write(nccl_logs.INFINIBAND)
    assert take_log({ENV_LOG: str(path)}).names == ("NET/Socket", "P2P")


def test_transports_are_not_known_without_a_log(tmp_path: Path) -> None:
    assert take_log({}) == Transports()
    delete_log({})
    assert take_log({ENV_LOG: str(tmp_path)}) == Transports()
    delete_log({ENV_LOG: str(tmp_path)})
    assert tmp_path.exists()


def test_transports_are_published_for_the_rank_and_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    folder.mkdir()
    config = train_config(tmp_path)
    telemetry = Telemetry(
        config, rank=0, world_size=2, shared=Shared(NodePage(folder=str(folder)), 0)
    )
    assert telemetry.progress.transport is None
    telemetry.device(Gpu("NVIDIA H200", "GPU-1a2b", "2.27.3", GpuMemory))
    own = Transports.of_log(nccl_logs.OLD_SHARED_MEMORY)
    telemetry.transport(own, Transports.of_all([own, Transports.of_log(nccl_logs.INFINIBAND)]))
    telemetry.close()
    page = read_series(RankCollector(NodeRanks(folder, range(2))).render().decode())
    (info,) = (key for key in page if key[0] == "finetune_train_info")
    assert info[-1] == "SHM,P2P"
    assert "GPU-1a2b" in info, "earlier labels remain"
    assert telemetry.progress.transport == "NET/IB,SHM,P2P"
    written = json.loads((Path(config.run_dir) / "progress.json").read_text())
    assert written["transport"] == "NET/IB,SHM,P2P"
    events = journal_in(Path(config.run_dir))
    (event,) = (one for one in events if one["event"] == "transport")
    assert (event["transport"], event["has_gpu_direct"]) == ("SHM,P2P", False)


def test_transports_that_are_not_known_are_empty(tmp_path: Path) -> None:
    telemetry = Telemetry(train_config(tmp_path), rank=0, world_size=2)
    telemetry.transport(Transports(), Transports())
    telemetry.close()
    assert telemetry.progress.transport is None
