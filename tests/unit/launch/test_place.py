"""Where a node and a rank find out about their place, and about the memory killer."""

import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from finetune_trainer import rendezvous
from finetune_trainer.config import FailureClass
from finetune_trainer.errors import ConfigError, Preempted, TrainerError, WorldSizeError
from finetune_trainer.launch.oom import count_oom_kills
from finetune_trainer.launch.start_ranks import Node, read_node
from finetune_trainer.launch.worker import run_rank
from finetune_trainer.launchers import Launch, read_launch
from finetune_trainer.rendezvous import wait_for_rank_zero
from finetune_trainer.world import gather_values, open_world
from support.launch.forked_ranks import Ranks
from support.launch.journals import journal_in, journals_in
from support.launch.launches import free_port, train_config, until

TWO_NODES = {"world": {"nnodes": 2, "nproc_per_node": 2}}


def test_a_single_node_needs_no_variables(tmp_path: Path) -> None:
    assert read_node(train_config(tmp_path), {}) == Node(rank=0, host="127.0.0.1", port=0)


@pytest.mark.parametrize("name", ["FINETUNE_NODE_RANK", "JOB_COMPLETION_INDEX"])
def test_a_node_reads_its_rank_and_the_address_of_node_0(tmp_path: Path, name: str) -> None:
    environ = {name: "1", "FINETUNE_RDZV_ENDPOINT": "[fd00::1]:29500"}
    config = train_config(tmp_path, **TWO_NODES)
    assert read_node(config, environ) == Node(rank=1, host="fd00::1", port=29500)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        pytest.param({}, "FINETUNE_NODE_RANK", id="no rank"),
        pytest.param({"FINETUNE_NODE_RANK": "2"}, "FINETUNE_NODE_RANK", id="rank too high"),
        pytest.param({"FINETUNE_NODE_RANK": "-1"}, "FINETUNE_NODE_RANK", id="rank below 0"),
        pytest.param({"FINETUNE_NODE_RANK": "0"}, "FINETUNE_RDZV_ENDPOINT", id="no endpoint"),
        pytest.param(
            {"FINETUNE_NODE_RANK": "0", "FINETUNE_RDZV_ENDPOINT": "host"},
            "FINETUNE_RDZV_ENDPOINT",
            id="no port",
        ),
    ],
)
def test_an_unusable_place_is_a_configuration_error_that_names_the_variable(
    tmp_path: Path, environ: dict[str, str], name: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is "):
        read_node(train_config(tmp_path, **TWO_NODES), environ)


def test_only_several_nodes_use_the_key_of_an_attempt_and_no_text_shows_it(tmp_path: Path) -> None:
    environ = {"FINETUNE_NODE_RANK": "1", "FINETUNE_RDZV_ENDPOINT": "host:1"}
    config, key = train_config(tmp_path, **TWO_NODES), 64 * "a"
    node = read_node(config, environ, key)
    assert node.key == key.encode()
    assert key not in repr(node)
    assert read_node(train_config(tmp_path), {}, key).key is None
    with pytest.raises(ConfigError, match=r"^FINETUNE_RDZV_KEY has 5 ") as error:
        read_node(config, environ, "short")
    assert "short" not in str(error.value)


def test_a_rank_waits_until_rank_0_accepts_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        wait_for_rank_zero("127.0.0.1", port, lambda: False, limit_seconds=0)


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_a_rank_0_that_never_answers_is_an_error_that_names_the_address(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(TrainerError, match=f"rank 0 does not respond at {host}:{port}"):
        wait_for_rank_zero(host, port, lambda: False, limit_seconds=0)


def test_a_rank_that_waits_says_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "_QUIET_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(TrainerError):
        wait_for_rank_zero("127.0.0.1", port, lambda: False, limit_seconds=0.3)
    told = f"waits for rank 0, no response from 127.0.0.1:{port} ("
    assert told in capfd.readouterr().err

    twelve = {"nnodes": 1, "nproc_per_node": 12}
    config = train_config(tmp_path, world=twelve, training={"global_batch_size": 12})
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "12", "MASTER_ADDR": "127.0.0.1"}
    missing = "11 of 12 ranks have not arrived (1, 2, 3, 4, 5, 6, 7, 8 and 3 more)"
    with (
        pytest.raises(TrainerError, match=re.escape(f"{missing} within 1 s")),
        open_world(config, {**place, "MASTER_PORT": str(port)}, limit_seconds=1.0),
    ):
        pass
    assert f"waits for the other ranks: {missing}, for " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("more", "error"),
    [
        pytest.param({}, TrainerError, id="elsewhere: its own limit"),
        pytest.param({"FINETUNE_NODE_NAME": "node-a"}, Preempted, id="in a pod: until a stop"),
    ],
)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_in_a_pod_of_the_operator_a_rank_has_no_limit_of_its_own(
    more: dict[str, str],
    error: type[Exception],
    rank: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_SECONDS", 1.0)
    place = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environ = {**place, "MASTER_PORT": str(free_port()), **more}
    stop_at = time.monotonic() + 3.0
    with (
        pytest.raises(error),
        open_world(train_config(tmp_path), environ, should_stop=lambda: time.monotonic() > stop_at),
    ):
        pass


def test_a_rank_that_waits_asks_at_most_once_a_second() -> None:
    num_asked, began = 0, time.monotonic()

    def count() -> bool:
        nonlocal num_asked
        num_asked += 1
        return time.monotonic() - began > 2.5

    with pytest.raises(Preempted):
        wait_for_rank_zero("127.0.0.1", 1, count)
    assert num_asked <= 1 + time.monotonic() - began


def test_rank_0_reports_the_missing_ranks_once_a_second_until_all_have_arrived(
    tmp_path: Path,
) -> None:
    port, seen = free_port(), list[str]()
    config = train_config(tmp_path)

    def arrive(rank: int, on_wait: Callable[[str], None]) -> None:
        launch = Launch("", rank, rank, 2, 2, "127.0.0.1", port)
        store = rendezvous.open_store(config, launch, {}, lambda: False, 60.0)
        rendezvous.rendezvous(store, rank, 2, lambda: False, 60.0, on_wait)

    def arrive_late() -> None:
        until(lambda: len(seen) > 1)
        arrive(1, seen.append)

    late = threading.Thread(target=arrive_late)
    late.start()
    began = time.monotonic()
    arrive(0, seen.append)
    late.join()
    assert set(seen[:-1]) == {"1 of 2 ranks have not arrived (1)"}
    assert seen[-1] == ""
    assert len(seen) <= 2 + time.monotonic() - began


def test_a_rank_told_to_stop_waits_no_longer() -> None:
    with pytest.raises(Preempted):
        wait_for_rank_zero("127.0.0.1", 1, lambda: True)


def test_a_rank_told_to_stop_waits_for_no_rank_0_that_leaves_while_it_connects(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def be_there_once() -> None:
            server.accept()[0].close()
            server.close()

        leaving = threading.Thread(target=be_there_once)
        leaving.start()
        place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        environ = {**place, "MASTER_PORT": str(server.getsockname()[1])}
        with (
            pytest.raises(Preempted),
            open_world(train_config(tmp_path), environ, should_stop=lambda: True),
        ):
            pass
        leaving.join()


def test_a_program_that_has_taken_rank_0s_port_is_told_of(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def refuse_all() -> None:
            with suppress(OSError):
                while True:
                    server.accept()[0].close()

        other = threading.Thread(target=refuse_all)
        other.start()
        port = server.getsockname()[1]
        place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        with (
            pytest.raises(TrainerError, match=f"the program at 127.0.0.1:{port} is not rank 0"),
            open_world(
                train_config(tmp_path),
                {**place, "MASTER_PORT": str(port)},
                limit_seconds=1.0,
            ),
        ):
            pass
        server.shutdown(socket.SHUT_RDWR)
        other.join()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, None, id="nobody"),
        pytest.param({"RANK": "0"}, None, id="half a pair"),
        pytest.param(
            {
                "RANK": "3",
                "WORLD_SIZE": "4",
                "LOCAL_RANK": "1",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "h",
                "MASTER_PORT": "29500",
                "TORCHELASTIC_RUN_ID": "x",
            },
            Launch("torchrun", 3, 1, 4, 2, "h", 29500),
            id="torchrun",
        ),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h"},
            Launch("the environment", 1, 1, 2, 2, "h", 0),
            id="Azure ML",
        ),
        pytest.param(
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            Launch("mpirun", 1, 1, 2, 2),
            id="mpirun",
        ),
    ],
)
def test_a_rank_reads_what_its_launcher_says(
    environ: dict[str, str], expected: Launch | None
) -> None:
    assert read_launch(environ) == expected


def test_a_launcher_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^WORLD_SIZE is 'two'"):
        read_launch({"RANK": "0", "WORLD_SIZE": "two"})


def test_a_world_of_another_size_is_refused_with_both_numbers(tmp_path: Path) -> None:
    config = train_config(tmp_path)
    environ = {"RANK": "0", "WORLD_SIZE": "3"}
    with (
        pytest.raises(WorldSizeError, match=r"the environment started 3 .* requires 2"),
        open_world(config, environ),
    ):
        pass
    with (
        pytest.raises(WorldSizeError, match=r"single process.* 1 .* requires 2"),
        open_world(config, {}),
    ):
        pass


def test_ranks_on_several_nodes_without_a_master_address_are_told_to_name_it(
    tmp_path: Path,
) -> None:
    environ = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    config = train_config(tmp_path, **TWO_NODES)
    with pytest.raises(ConfigError, match=r"^MASTER_ADDR is not set"), open_world(config, environ):
        pass


def test_a_single_process_needs_no_groups(tmp_path: Path) -> None:
    with open_world(train_config(tmp_path, world={"nproc_per_node": 1}), {}) as world:
        assert (world.rank, world.world_size, world.is_main) == (0, 1, True)
        assert (world.group, world.control_group, world.checkpoint_group) == (None, None, None)
        assert gather_values(world.control_group, "value", str) == ["value"]


@pytest.mark.parametrize(
    ("own_group", "file"),
    [
        pytest.param("0::/kubepods/pod1\n", "kubepods/pod1/memory.events", id="v2"),
        pytest.param("0::/../../x\n", "memory.events", id="v2, own root"),
        pytest.param(
            "5:cpu:/\n4:memory:/docker/1\n", "memory/docker/1/memory.oom_control", id="v1"
        ),
    ],
)
def test_out_of_memory_kills_are_read_from_the_control_group(
    tmp_path: Path, own_group: str, file: str
) -> None:
    (tmp_path / "cgroup").write_text(own_group)
    counter = tmp_path / "fs" / file
    counter.parent.mkdir(parents=True)
    counter.write_text("low 0\noom 3\noom_kill 2\n")
    assert count_oom_kills(tmp_path / "fs", tmp_path / "cgroup") == 2


def test_no_control_group_means_no_out_of_memory_kills(tmp_path: Path) -> None:
    assert count_oom_kills(tmp_path, tmp_path / "cgroup") == 0


def test_a_missing_gpu_is_named_by_the_field_that_asks_for_it(tmp_path: Path) -> None:
    config = train_config(tmp_path, world={"device": "cuda", "nproc_per_node": 1})
    ninety_ninth = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "99", "LOCAL_WORLD_SIZE": "1"}
    last_words = run_rank(
        config, "support.launch.rank_entries:finish", environ=ninety_ninth
    ).termination
    assert last_words.exit_code == 78
    assert last_words.message.startswith(
        "spec.topology.gpusPerNode 1: there is no GPU 99 on this node, "
    )
    assert "world." not in last_words.message


@pytest.mark.parametrize(
    ("error", "is_written"), [(None, True), (OSError(28, "No space left on device"), False)]
)
def test_out_of_memory_writes_the_state_of_the_allocator(
    error: OSError | None, is_written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dump(path: str) -> None:
        if error is not None:
            raise error
        Path(path).write_bytes(b"segments")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    config = train_config(tmp_path, world={"nproc_per_node": 1})
    entry = "support.launch.rank_entries:run_out_of_gpu_memory"
    termination = run_rank(config, entry, environ={}).termination
    assert termination.failure_class is FailureClass.OUT_OF_MEMORY
    run_dir = Path(config.run_dir)
    assert (run_dir / "logs/attempt-1.1/rank-0.memory.pickle").exists() == is_written
    events = journal_in(run_dir)
    (snapshot,) = [event for event in events if event["event"] == "memory_snapshot"]
    assert ("error" in snapshot) != is_written


def test_a_job_that_takes_over_has_logs_of_its_own(tmp_path: Path) -> None:
    for uid in ("uid-a", "uid-b"):
        job = {"name": "tiny", "uid": uid, "attempt": 1}
        config = train_config(tmp_path, world={"nproc_per_node": 1}, job=job, take_over=True)
        # In a process of its own, which the watch of the first job's claims may end.
        ranks = Ranks(config, entry="support.launch.rank_entries:finish")
        assert ranks.codes() == [0]
    folders = [path.parent.name for path in journals_in(Path(config.run_dir))]
    assert folders == ["attempt-1.1", "attempt-1.2"]
    claims = [one["generation"] for one in journal_in(Path(config.run_dir)) if "generation" in one]
    assert claims == [1, 1]


def test_a_run_directory_that_cannot_be_written_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    run_dir = tmp_path / "file" / "run"
    config = train_config(tmp_path, world={"nproc_per_node": 1}, run_dir=str(run_dir))
    last_words = run_rank(config, "support.launch.rank_entries:finish", environ={}).termination
    assert (last_words.exit_code, last_words.rank) == (78, 0)
    assert last_words.message.startswith(
        f"{run_dir} cannot be created: {tmp_path / 'file'} is not a folder; move it away"
    )
