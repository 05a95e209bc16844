"""What the page of a node answers, by path.

The operator and Prometheus ask; nothing is ever pushed, so a training pod holds no token.
"""

import json
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST

from finetune_trainer.telemetry.node.gpus import Gpus
from finetune_trainer.telemetry.node.node_ranks import NodeRanks
from finetune_trainer.telemetry.node.node_watch import NodeWatch
from finetune_trainer.telemetry.node.page import RankCollector
from finetune_trainer.telemetry.node.peers import MAX_NEWS_BYTES, PEERS_PATH
from finetune_trainer.telemetry.node.server import JSON, Answer, Route, Routes


def routes(ranks: NodeRanks, gpus: Gpus | None = None, watch: NodeWatch | None = None) -> Routes:
    """Return GET /metrics, of each node; all else is of rank 0's.

    That is GET /progress, POST /checkpoint, and POST /ranks for the job's other nodes.
    """
    page = RankCollector(ranks, watch)

    def metrics(body: bytes) -> Answer:
        text = page.render() + (gpus.render() if gpus is not None else b"")
        return HTTPStatus.OK, CONTENT_TYPE_LATEST, text

    def progress(body: bytes) -> Answer:
        if not ranks.has_rank_zero:
            return _elsewhere()
        text = ranks.progress()
        return (HTTPStatus.OK, JSON, _with(text, watch)) if text is not None else _not_yet()

    def news(body: bytes) -> Answer:
        if watch is None or watch.desk is None:
            return _elsewhere()
        status, text = watch.desk.receive(body)
        return (status, JSON, text.encode()) if status == HTTPStatus.OK else _say(status, text)

    def checkpoint(body: bytes) -> Answer:
        if not ranks.has_rank_zero:
            return _elsewhere()
        if not ranks.ask_for_save():
            return _not_yet()
        return _say(HTTPStatus.ACCEPTED, "a checkpoint will be saved at the next step boundary")

    return {
        "/metrics": Route("GET", metrics),
        "/progress": Route("GET", progress),
        "/checkpoint": Route("POST", checkpoint),
        PEERS_PATH: Route("POST", news, MAX_NEWS_BYTES),
    }


def _with(progress: bytes, watch: NodeWatch | None) -> bytes:
    """Return the progress that rank 0 published, with what its node finds of all ranks."""
    if watch is None or not watch.suspects:
        return progress
    suspects = [one.model_dump(mode="json", by_alias=True) for one in watch.suspects]
    return json.dumps({**json.loads(progress), "suspects": suspects}).encode()


def _elsewhere() -> Answer:
    return _say(HTTPStatus.NOT_FOUND, "rank 0 is on another node; ask the page of that one")


def _not_yet() -> Answer:
    return _say(HTTPStatus.SERVICE_UNAVAILABLE, "rank 0 has not reported anything yet; ask again")


def _say(status: HTTPStatus, sentence: str) -> Answer:
    return status, JSON, f"{json.dumps({'message': sentence})}\n".encode()
