"""Exchange snapshots between a job's nodes: all nodes send to rank 0's node and get its reply.

Each node posts a snapshot of its ranks every few seconds to the page of rank 0's node, with a
secret: it follows from the attempt's key, or rank 0 gave it to all ranks at the rendezvous. Other
clients that can reach the page do not know it. Only rank 0's node judges. Its reply has the scores
for the sender's own page and the number of the stall to collect evidence for.
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
from finetune_trainer.telemetry.node.snapshots import RankSnapshot, Seen

PEERS_PATH = "/ranks"
MAX_NEWS_BYTES = 1 << 18
_MAX_REPLY_BYTES = 1 << 18
_TIMEOUT_SECONDS = 3.0
SILENT_AFTER_SECONDS = 15.0
_NEWS_MISSED = 3  # intervals; in large jobs nodes report less often
MAX_RANKS_OF_NODE = 256


def word_of(key: bytes) -> str:
    """Return the secret of rank 0's page that follows from the attempt's key."""
    return hmac.new(key, b"page of rank 0", "sha256").hexdigest()


class News(ContractModel):
    """Request of a node to rank 0's node.

    Attributes:
        word: Secret of rank 0's page.
        node: Name of the sender.
        ranks: Its ranks that have begun.
    """

    version: Literal[1] = 1
    word: Annotated[str, Field(max_length=256)]
    node: Annotated[str, Field(max_length=253)]
    ranks: Annotated[tuple[RankSnapshot, ...], Field(max_length=MAX_RANKS_OF_NODE)]


class Reply(ContractModel):
    """Response of rank 0's node.

    Attributes:
        scores: Busy time of the sender's ranks relative to the others' median, by rank.
        stall: Number of the stall to collect evidence for; 0 for none.
    """

    version: Literal[1] = 1
    scores: dict[int, float] = Field(default_factory=dict)
    stall: Annotated[int, Field(ge=0)] = 0


class NewsDesk:
    """Collects the snapshots of all nodes on rank 0's node; requests come in threads."""

    def __init__(
        self,
        word: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        interval: float = 1.0,
    ) -> None:
        """Accept news with the secret `word`; each node sends some every `interval` seconds."""
        self._word = word
        self._silent_after = max(SILENT_AFTER_SECONDS, _NEWS_MISSED * interval)
        self._clock = clock
        self._lock = Lock()
        self._heard: dict[int, tuple[float, Seen]] = {}
        self._scores: Mapping[int, float] = {}
        self._stall = 0

    def store(self, node: str, ranks: tuple[RankSnapshot, ...]) -> None:
        """Store the snapshots of one node."""
        now = self._clock()
        with self._lock:
            self._heard.update((one.rank, (now, Seen(one, node))) for one in ranks)

    def reply(self, ranks: tuple[RankSnapshot, ...]) -> Reply:
        """Return the reply to the node of these ranks."""
        with self._lock:
            scores = {one.rank: self._scores[one.rank] for one in ranks if one.rank in self._scores}
            return Reply(scores=scores, stall=self._stall)

    def receive(self, body: bytes) -> tuple[HTTPStatus, str]:
        """Return status and text of the response to a request."""
        try:
            news = News.model_validate_json(body)
        except ValidationError as error:
            return HTTPStatus.BAD_REQUEST, f"not a valid request of version 1: {error.errors()[0]}"
        if not hmac.compare_digest(news.word.encode(), self._word.encode()):
            return HTTPStatus.FORBIDDEN, "only ranks of this job may report here"
        self.store(news.node, news.ranks)
        return HTTPStatus.OK, self.reply(news.ranks).to_json()

    def seen(self) -> dict[int, Seen]:
        """Return the newest snapshot of each known rank."""
        now = self._clock()
        with self._lock:
            return {
                rank: one if now - at < self._silent_after else Seen(one.look, one.node, True)
                for rank, (at, one) in self._heard.items()
            }

    def set_results(self, scores: Mapping[int, float], stall: int) -> None:
        """Store the results that nodes get with their next news."""
        with self._lock:
            self._scores, self._stall = dict(scores), stall


class RankZero(ContractModel):
    """Destination of a node's news, distributed by rank 0 at the rendezvous.

    Attributes:
        host: Address of rank 0 as seen from this node.
        port: Port of the page of its node.
        word: Secret by which that page recognises the job's own nodes; empty if it follows from
            the attempt's key.
    """

    host: str
    port: int
    word: str


def send(to: RankZero, news: News) -> Reply:
    """Send news to rank 0's node and return its reply.

    Raises:
        OSError: The node does not respond.
        HTTPException: The response is not HTTP.
        ValueError: The response has another version, or is a refusal.
    """
    connection = HTTPConnection(to.host, to.port, timeout=_TIMEOUT_SECONDS)
    try:
        connection.request("POST", PEERS_PATH, news.to_json())
        response = connection.getresponse()
        text = response.read(_MAX_REPLY_BYTES)
    finally:
        connection.close()
    if response.status != HTTPStatus.OK:
        raise ValueError(f"rank 0's node responded with status {response.status}")
    return Reply.model_validate_json(text)
