"""Votes of two real processes: what one rank casts, both see, at the same boundary."""

import json
import subprocess
import sys
from pathlib import Path

from support.launch.launches import clean_environment, free_port, train_config

# Casts the votes given as JSON [[stop, save, overtaken, steps to profile] by boundary] and prints
# what was agreed at each.
VOTE = """
import json, sys, time
from pathlib import Path
from finetune_trainer.config import TrainConfig
from finetune_trainer.control import Agreement, leave
from finetune_trainer.world import gather_values, open_world
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
    told = gather_values(world.control_group, f"from rank {world.rank}", str)
print(json.dumps([seen, between, at_once, told]))
leave(0)
"""


KINDS = ("stop", "save", "overtaken", "profile")


def agreed(folder: Path, plans: list[list[list[list[bool]]]]) -> list[list[list[object]]]:
    """Return what each of two ranks saw, boundary by boundary, over all plans."""
    path = folder / "config.json"
    path.write_text(train_config(folder).to_json())
    port = str(free_port())
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", VOTE, str(path), json.dumps(plans)],
            env=clean_environment(RANK=rank, LOCAL_RANK=rank, **place),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    seen, between, at_once, told = zip(*(json.loads(output) for output in outputs), strict=True)
    assert between == ([[False, False, True], True, 3],) * 2, "only a stop is seen between steps"
    assert at_once == ([True, False],) * 2
    assert told == (["from rank 0", "from rank 1"],) * 2
    return list(seen)


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


def test_every_rank_sees_every_vote_at_the_same_boundary(tmp_path: Path) -> None:
    votes: list[list[tuple[int, int, str]]] = [
        [],
        [(0, 0, "stop")],
        [(1, 3, "stop")],
        [(1, 5, "stop")],
        [(0, 2, "save"), (1, 4, "stop")],
        [(0, 1, "save"), (1, 1, "save"), (1, 2, "save")],
        [(0, 3, "overtaken"), (1, 3, "stop")],
        [(0, 1, "profile"), (1, 1, "save")],
    ]
    first, second = agreed(tmp_path, [plan(6, *each) for each in votes])
    assert first == second == [line for each in votes for line in expected(6, *each)]
