"""Handle the requests to a node's page, by path.

The operator and Prometheus pull. A training pod does not push, so it does not need a token.
"""

import json
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST

from finetune_trainer.config import MAX_PROFILED_STEPS
from finetune_trainer.telemetry.node.gpus import Gpus
from finetune_trainer.telemetry.node.node_ranks import NodeRanks
from finetune_trainer.telemetry.node.node_watch import NodeWatch
from finetune_trainer.telemetry.node.page import RankCollector
from finetune_trainer.telemetry.node.peers import MAX_NEWS_BYTES, PEERS_PATH
from finetune_trainer.telemetry.node.server import JSON, Response, Route, Routes

_PROFILED_STEPS = 3  # of a request without a number


def routes(ranks: NodeRanks, gpus: Gpus | None = None, watch: NodeWatch | None = None) -> Routes:
    """Return the routes: GET /metrics on each node, the others on rank 0's node only.

    The others are GET /progress; POST /checkpoint and POST /profile, which accept loopback
    connections only; and POST /ranks for the job's other nodes.
    """
    page = RankCollector(ranks, watch)

    def metrics(body: bytes) -> Response:
        text = page.render() + (gpus.render() if gpus is not None else b"")
        return HTTPStatus.OK, CONTENT_TYPE_LATEST, text

    def progress(body: bytes) -> Response:
        if not ranks.has_rank_zero:
            return _elsewhere()
        text = ranks.progress()
        return (HTTPStatus.OK, JSON, _with(text, watch)) if text is not None else _not_yet()

    def news(body: bytes) -> Response:
        if watch is None or watch.desk is None:
            return _elsewhere()
        status, text = watch.desk.receive(body)
        return (status, JSON, text.encode()) if status == HTTPStatus.OK else _message(status, text)

    def checkpoint(body: bytes) -> Response:
        if not ranks.has_rank_zero:
            return _elsewhere()
        if not ranks.request_save():
            return _not_yet()
        return _message(HTTPStatus.ACCEPTED, "a checkpoint will be saved at the next step boundary")

    def profile(body: bytes) -> Response:
        if not ranks.has_rank_zero:
            return _elsewhere()
        steps = _steps_in(body)
        if steps is None:
            sentence = f'send {{"steps": N}} with N from 1 to {MAX_PROFILED_STEPS}'
            return _message(HTTPStatus.BAD_REQUEST, sentence)
        is_accepted = ranks.request_profile(steps)
        if is_accepted is None:
            return _not_yet()
        if not is_accepted:
            return _message(HTTPStatus.CONFLICT, "a profile is being recorded; wait for its end")
        sentence = "the profile begins in two steps; GET /progress shows its path when it is ready"
        return _message(HTTPStatus.ACCEPTED, sentence)

    return {
        "/metrics": Route("GET", metrics),
        "/progress": Route("GET", progress),
        "/checkpoint": Route("POST", checkpoint, is_local=True),
        "/profile": Route("POST", profile, is_local=True),
        PEERS_PATH: Route("POST", news, MAX_NEWS_BYTES, is_any_host=True),
    }


def _steps_in(body: bytes) -> int | None:
    """Return the number of steps in a request, 3 if it is empty; None if it is invalid."""
    try:
        request = json.loads(body or b"{}")
    except ValueError:
        return None
    if not isinstance(request, dict) or not request.keys() <= {"steps"}:
        return None
    steps = request.get("steps", _PROFILED_STEPS)
    is_valid = type(steps) is int and 1 <= steps <= MAX_PROFILED_STEPS
    return steps if is_valid else None


def _with(progress: bytes, watch: NodeWatch | None) -> bytes:
    """Add the suspects that rank 0's node has found to the progress that rank 0 published."""
    if watch is None or not watch.suspects:
        return progress
    suspects = [one.model_dump(mode="json", by_alias=True) for one in watch.suspects]
    return json.dumps({**json.loads(progress), "suspects": suspects}).encode()


def _elsewhere() -> Response:
    return _message(HTTPStatus.NOT_FOUND, "rank 0 is on another node; ask the page of that one")


def _not_yet() -> Response:
    return _message(
        HTTPStatus.SERVICE_UNAVAILABLE, "rank 0 has not reported anything yet; ask again"
    )


def _message(status: HTTPStatus, sentence: str) -> Response:
    return status, JSON, f"{json.dumps({'message': sentence})}\n".encode()
