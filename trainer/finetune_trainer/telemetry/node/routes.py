"""What the page of a node answers, by path.

The operator and Prometheus ask; nothing is ever pushed, so a training pod holds no token.
"""

import json
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST

from finetune_trainer.telemetry.node.gpus import Gpus
from finetune_trainer.telemetry.node.page import RankCollector
from finetune_trainer.telemetry.node.ranks import NodeRanks
from finetune_trainer.telemetry.node.server import JSON, Answer, Routes


def routes(ranks: NodeRanks, gpus: Gpus | None = None) -> Routes:
    """Return GET /metrics, of each node; GET /progress and POST /checkpoint, of rank 0's."""
    page = RankCollector(ranks)

    def metrics() -> Answer:
        text = page.render() + (gpus.render() if gpus is not None else b"")
        return HTTPStatus.OK, CONTENT_TYPE_LATEST, text

    def progress() -> Answer:
        if not ranks.has_rank_zero:
            return _elsewhere()
        text = ranks.progress()
        return (HTTPStatus.OK, JSON, text) if text is not None else _not_yet()

    def checkpoint() -> Answer:
        if not ranks.has_rank_zero:
            return _elsewhere()
        if not ranks.ask_for_save():
            return _not_yet()
        return _say(HTTPStatus.ACCEPTED, "a checkpoint will be saved at the next step boundary")

    return {
        "/metrics": ("GET", metrics),
        "/progress": ("GET", progress),
        "/checkpoint": ("POST", checkpoint),
    }


def _elsewhere() -> Answer:
    return _say(HTTPStatus.NOT_FOUND, "rank 0 is on another node; ask the page of that one")


def _not_yet() -> Answer:
    return _say(HTTPStatus.SERVICE_UNAVAILABLE, "rank 0 has not reported anything yet; ask again")


def _say(status: HTTPStatus, sentence: str) -> Answer:
    return status, JSON, f"{json.dumps({'message': sentence})}\n".encode()
