"""Messages between two real processes: votes and values arrive on both, and code on none."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.launch.launches import clean_environment, free_port, train_config

# Casts the votes given as JSON [[stop, save, overtaken, steps to profile] by boundary] and prints
# what was agreed at each.
VOTE = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from finetune_trainer.config import TrainConfig
from finetune_trainer.control import Agreement, leave
from finetune_trainer.errors import TrainerError
from finetune_trainer.world import gather_values, open_world

class Foreign:
    def __reduce__(self):
        return os.mkdir, (f"{sys.argv[1]}.mark",)

def refused(collective, *args, **options):
    # Return the sentence of the refusal.
    try:
        collective(*args, **options)
    except TrainerError as error:
        return str(error).partition(";")[0]

def hostile(rank):
    # Return the refusals of this rank; rank 1 sends the code in each object collective.
    own, room = [None, Foreign()][rank], [None, None]
    first = rank == 0
    return [
        refused(dist.all_gather_object, room, own),
        refused(dist.broadcast_object_list, [own], src=1),
        refused(dist.gather_object, own, room if first else None, dst=0),
        refused(dist.scatter_object_list, [None], None if first else [own, own], src=1),
        refused(dist.recv_object_list, [None], src=1)
        if first
        else refused(dist.send_object_list, [own], dst=0),
    ]

config = TrainConfig.read(Path(sys.argv[1]))
plans = json.loads(sys.argv[2])
with open_world(config) as world:
    seen = []
    for rounds in plans:
        agreement = Agreement(world)
        for votes in rounds[world.rank]:
            time.sleep(0.002 * world.rank)
            agreed = agreement.exchange(*votes)
            seen.append(agreed)
        seen.append(agreement.finish_vote())
    agreement = Agreement(world)
    agreement.exchange(False, world.rank == 0, False, 3 if world.rank == 0 else 0)
    polls = [agreement.is_stopping(world.rank == 1 and poll == 1) for poll in range(3)]
    later = agreement.exchange(False)
    between = [polls, later.save, later.profile_steps]
    at_once = [agreement.any(world.rank == 1), agreement.any(False)]
    refusals = hostile(world.rank)
    value, kind = (1, int) if world.rank else ("zero", str)
    refusals.append(refused(gather_values, world.control_group, value, kind))
    told = gather_values(world.control_group, f"from rank {world.rank}", str)
print(json.dumps([seen, between, at_once, told, refusals]))
leave(0)
"""


KINDS = ("stop", "save", "overtaken", "profile")


VOTES: list[list[tuple[int, int, str]]] = [
    [],
    [(0, 0, "stop")],
    [(1, 3, "stop")],
    [(1, 5, "stop")],
    [(0, 2, "save"), (1, 4, "stop")],
    [(0, 1, "save"), (1, 1, "save"), (1, 2, "save")],
    [(0, 3, "overtaken"), (1, 3, "stop")],
    [(0, 1, "profile"), (1, 1, "save")],
]


class Seen(NamedTuple):
    """Results of one rank, in the order in which the script prints them."""

    votes: list[list[bool]]
    between: list[Any]
    at_once: list[bool]
    told: list[str]
    refusals: list[str | None]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Seen, Seen]:
    """Run both ranks once; code that a rank executes makes the folder config.json.mark."""
    folder = tmp_path_factory.mktemp("ranks")
    plans = [plan(6, *each) for each in VOTES]
    path = folder / "config.json"
    path.write_text(train_config(folder).to_json())
    port = str(free_port())
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", VOTE, str(path), json.dumps(plans)],
            env=clean_environment(RANK=rank, LOCAL_RANK=rank, **place),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    first, second = (Seen(*json.loads(rank.communicate(timeout=60)[0])) for rank in processes)
    assert [rank.returncode for rank in processes] == [0, 0]
    assert not Path(f"{path}.mark").exists()
    return first, second


def plan(boundaries: int, *votes: tuple[int, int, str]) -> list[list[list[bool]]]:
    """Return the votes of two ranks: (rank, boundary, one of KINDS) are cast, no others."""
    return [
        [[(rank, at, kind) in votes for kind in KINDS] for at in range(boundaries)]
        for rank in (0, 1)
    ]


def expected(boundaries: int, *votes: tuple[int, int, str]) -> list[list[bool]]:
    """Return the votes that every rank must see, one boundary after they were cast."""
    cast = {(at, kind) for _, at, kind in votes}
    first = [False for _ in KINDS]
    return [first, *([(at, kind) in cast for kind in KINDS] for at in range(boundaries))]


def test_every_rank_sees_every_vote_at_the_same_boundary(ranks: tuple[Seen, Seen]) -> None:
    first, second = ranks
    assert first.votes == second.votes == [line for each in VOTES for line in expected(6, *each)]
    for one in ranks:
        assert one.between == [[False, False, True], True, 3], "only a stop is seen between steps"
        assert one.at_once == [True, False]
        assert one.told == ["from rank 0", "from rank 1"]


def test_every_receiver_refuses_code_and_values_of_another_type(ranks: tuple[Seen, Seen]) -> None:
    *first, first_value = ranks[0].refusals
    *second, second_value = ranks[1].refusals
    code = "an object that another rank sent names posix.mkdir, which is not allowed"
    assert first == [code] * 5
    assert second == [code, None, None, code, None], "it receives its own from two collectives"
    sentence = "rank {} sent an invalid message (Input should be a valid {}"
    assert str(first_value).startswith(sentence.format(1, "string"))
    assert str(second_value).startswith(sentence.format(0, "integer"))
