"""Where the page of rank 0's node is: rank 0 tells all ranks once they have met.

Called by `worker` in each rank, with the world open. The port may be another than configured, and
the word that admits a node to that page is nobody else's business, so both go the way of the job's
own ranks.
"""

from pathlib import Path
from urllib.parse import urlsplit

from finetune_trainer.files import replace_text
from finetune_trainer.launchers import Launch
from finetune_trainer.telemetry.node.node_watch import RANK_ZERO_FILE
from finetune_trainer.telemetry.node.peers import RankZero
from finetune_trainer.telemetry.shared import NodePage
from finetune_trainer.world import World, gather_objects


def tell_nodes(world: World, page: NodePage, launch: Launch) -> None:
    """Tell the page of this node where rank 0's is; a collective where there are several nodes.

    Raises:
        OSError: there is no room for it.
    """
    if launch.local_world_size == launch.world_size:
        return
    told = (urlsplit(page.url).port, page.word) if page.word is not None else None
    where = gather_objects(world.control_group, told)[0]
    is_first = launch.rank == page.first_rank and launch.rank != 0
    if where is not None and is_first and page.folder is not None:
        port, word = where
        zero = RankZero(host=launch.master_addr.strip("[]"), port=port, word=word)
        replace_text(Path(page.folder) / RANK_ZERO_FILE, zero.to_json())
