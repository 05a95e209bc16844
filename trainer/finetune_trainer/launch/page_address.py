"""Distribute the address of rank 0's node page to all ranks after the rendezvous.

Called by `worker` in each rank, with the world open. The port may differ from the configured one,
and the secret with which a node may use that page must stay within the job. Both are therefore sent
with a collective of the ranks.
"""

from pathlib import Path
from urllib.parse import urlsplit

from finetune_trainer.files import replace_text
from finetune_trainer.launchers import Launch
from finetune_trainer.telemetry.node.node_watch import RANK_ZERO_FILE
from finetune_trainer.telemetry.node.peers import RankZero
from finetune_trainer.telemetry.shared import NodePage
from finetune_trainer.world import World, gather_values


def distribute_page_address(world: World, page: NodePage, launch: Launch) -> None:
    """Give this node's page the address of rank 0's page; a collective if nodes > 1.

    Raises:
        OSError: There is no room.
    """
    if launch.local_world_size == launch.world_size:
        return
    own = (urlsplit(page.url).port, page.word) if page.word is not None else None
    where = gather_values(world.control_group, own, tuple[int, str] | None)[0]
    is_first = launch.rank == page.first_rank and launch.rank != 0
    if where is not None and is_first and page.folder is not None:
        port, word = where
        zero = RankZero(host=launch.master_addr.strip("[]"), port=port, word=word)
        replace_text(Path(page.folder) / RANK_ZERO_FILE, zero.to_json())
