"""The nodes of a job tell rank 0's node what their ranks do, and hear what came of it.

Each node sends a look at its ranks every few seconds, by POST to the page of rank 0's node and with
the word that rank 0 gave to all ranks when they met: whoever else can reach the page does not know
it. Only rank 0's node judges. The answer has what belongs on the sender's own page, and which
evidence it is to keep.
"""

import hmac
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.client import HTTPConnection
from threading import Lock
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from finetune_trainer.config import ContractModel
from finetune_trainer.telemetry.node.looks import RankLook, Seen

PEERS_PATH = "/ranks"
MAX_NEWS_BYTES = 1 << 18
_MAX_ANSWER_BYTES = 1 << 18
_TIMEOUT_SECONDS = 3.0
SILENT_AFTER_SECONDS = 15.0
_NEWS_MISSED = 3  # in a job of so many nodes that they have some less often
MAX_RANKS_OF_NODE = 256


class News(ContractModel):
    """What a node tells rank 0's.

    Attributes:
        word: what rank 0 told all ranks when they met.
        node: the sender's name.
        ranks: its ranks that have begun.
    """

    version: Literal[1] = 1
    word: Annotated[str, Field(max_length=256)]
    node: Annotated[str, Field(max_length=253)]
    ranks: Annotated[tuple[RankLook, ...], Field(max_length=MAX_RANKS_OF_NODE)]


class Reply(ContractModel):
    """What rank 0's node answers.

    Attributes:
        scores: of the sender's ranks, by rank: busy time by the median of the others'.
        stall: number of the stall of which evidence is to be kept; 0 for none.
    """

    version: Literal[1] = 1
    scores: dict[int, float] = Field(default_factory=dict)
    stall: Annotated[int, Field(ge=0)] = 0


class NewsDesk:
    """Collects the looks of all nodes, on rank 0's; requests come in threads."""

    def __init__(
        self,
        word: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        interval: float = 1.0,
    ) -> None:
        """Take news from whoever knows `word`; each node has some every `interval` seconds."""
        self._word = word
        self._silent_after = max(SILENT_AFTER_SECONDS, _NEWS_MISSED * interval)
        self._clock = clock
        self._lock = Lock()
        self._heard: dict[int, tuple[float, Seen]] = {}
        self._scores: Mapping[int, float] = {}
        self._stall = 0

    def hear(self, node: str, ranks: tuple[RankLook, ...]) -> None:
        """Take the looks of one node."""
        now = self._clock()
        with self._lock:
            self._heard.update((one.rank, (now, Seen(one, node))) for one in ranks)

    def reply(self, ranks: tuple[RankLook, ...]) -> Reply:
        """Return what concerns the node of these ranks."""
        with self._lock:
            scores = {one.rank: self._scores[one.rank] for one in ranks if one.rank in self._scores}
            return Reply(scores=scores, stall=self._stall)

    def receive(self, body: bytes) -> tuple[HTTPStatus, str]:
        """Return status and text of the answer to a request."""
        try:
            news = News.model_validate_json(body)
        except ValidationError as error:
            return HTTPStatus.BAD_REQUEST, f"these are no news of version 1: {error.errors()[0]}"
        if not hmac.compare_digest(news.word.encode(), self._word.encode()):
            return HTTPStatus.FORBIDDEN, "only ranks of this job may tell what they do"
        self.hear(news.node, news.ranks)
        return HTTPStatus.OK, self.reply(news.ranks).to_json()

    def seen(self) -> dict[int, Seen]:
        """Return the newest look at each rank that was heard of."""
        now = self._clock()
        with self._lock:
            return {
                rank: one if now - at < self._silent_after else Seen(one.look, one.node, True)
                for rank, (at, one) in self._heard.items()
            }

    def tell(self, scores: Mapping[int, float], stall: int) -> None:
        """Keep what nodes are to hear with their next news."""
        with self._lock:
            self._scores, self._stall = dict(scores), stall


class RankZero(ContractModel):
    """Where a node's news go; rank 0 has told all ranks when they met.

    Attributes:
        host: of rank 0, as this node knows it.
        port: of the page of its node.
        word: by which that knows the job's own nodes.
    """

    host: str
    port: int
    word: str


def send(to: RankZero, news: News) -> Reply:
    """Send news to rank 0's node, and return what it answers.

    Raises:
        OSError: it does not answer.
        HTTPException: what answers speaks no HTTP.
        ValueError: what it answers is of another version, or a refusal.
    """
    connection = HTTPConnection(to.host, to.port, timeout=_TIMEOUT_SECONDS)
    try:
        connection.request("POST", PEERS_PATH, news.to_json())
        answer = connection.getresponse()
        text = answer.read(_MAX_ANSWER_BYTES)
    finally:
        connection.close()
    if answer.status != HTTPStatus.OK:
        raise ValueError(f"rank 0's node answers {answer.status}")
    return Reply.model_validate_json(text)
