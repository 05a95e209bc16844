"""What nodes tell the node of rank 0, and what that takes from whom."""

import json
import secrets
import socket
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_trainer.telemetry.boundary import Boundary
from finetune_trainer.telemetry.node.node_ranks import NodeRanks
from finetune_trainer.telemetry.node.node_watch import RANK_ZERO_FILE, NodeWatch, WatchConfig
from finetune_trainer.telemetry.node.peers import (
    MAX_NEWS_BYTES,
    MAX_RANKS_OF_NODE,
    PEERS_PATH,
    SILENT_AFTER_SECONDS,
    News,
    NewsDesk,
    RankZero,
    send,
)
from finetune_trainer.telemetry.node.server import JSON, PageServer, Response, Route
from finetune_trainer.telemetry.node.snapshots import RankSnapshot
from finetune_trainer.telemetry.node.start_page import watch_config
from support.launch.launches import train_config

WORD = "a word"
BOUNDARY = Boundary(
    steps=3,
    at=1234.5678901,
    waiting_seconds=1.25,
    data_seconds=0.5,
    checkpoint_seconds=0.125,
    apart_seconds=0,
)


def look(rank: int, position: int = 7) -> RankSnapshot:
    return RankSnapshot(
        rank=rank,
        process_start=10**12,
        process="S",
        phase="checkpoint_blocking",
        boundary=BOUNDARY,
        position=position,
    )


def news(*ranks: int, word: str = WORD) -> News:
    return News(word=word, node="node-b", ranks=tuple(map(look, ranks)))


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def desk_of(clock: Callable[[], float] | None = None) -> NewsDesk:
    return NewsDesk(WORD, clock or Clock())


def test_what_a_node_tells_is_seen_as_it_was_told() -> None:
    desk = desk_of()
    status, _ = desk.receive(news(2, 3).to_json().encode())
    assert status == HTTPStatus.OK
    assert {rank: (one.look, one.node) for rank, one in desk.seen().items()} == {
        rank: (look(rank), "node-b") for rank in (2, 3)
    }


def test_a_node_hears_of_its_own_ranks_and_what_evidence_is_wanted() -> None:
    desk = desk_of()
    desk.set_results({0: 1.0, 2: 1.2, 3: 0.9}, stall=2)
    _, text = desk.receive(news(2, 3).to_json().encode())
    assert json.loads(text) == {"version": 1, "scores": {"2": 1.2, "3": 0.9}, "stall": 2}


def test_a_node_that_says_nothing_for_some_time_is_silent() -> None:
    clock = Clock()
    desk = desk_of(clock)
    desk.store("node-a", (look(0),))
    desk.store("node-b", (look(1),))
    clock.now += SILENT_AFTER_SECONDS
    desk.store("node-a", (look(0),))
    assert [one.is_silent for one in desk.seen().values()] == [False, True]


def test_a_node_of_very_many_is_heard_of_less_often_and_not_silent(tmp_path: Path) -> None:
    clock = Clock()
    config = WatchConfig(run_dir=str(tmp_path), attempt=1, node="a", num_nodes=4096, word=WORD)
    desk = NodeWatch(config, NodeRanks(tmp_path, [0]), tmp_path, clock).desk
    assert desk is not None
    desk.store("node-b", (look(1),))
    clock.now += 2 * 4096 / 50
    assert not desk.seen()[1].is_silent
    clock.now += 2 * 4096 / 50
    assert desk.seen()[1].is_silent


def test_news_of_the_largest_node_fit() -> None:
    text = news(*range(MAX_RANKS_OF_NODE)).to_json()
    assert len(text) < MAX_NEWS_BYTES


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(news(1, word="another").to_json(), 403, id="without the word"),
        pytest.param(news(1).to_json()[:-30], 400, id="cut off"),
        pytest.param("", 400, id="nothing"),
        pytest.param("[]", 400, id="a list"),
        pytest.param(news(1).to_json().replace(": 1,", ": 2,", 1), 400, id="another version"),
        pytest.param(news(1).to_json().replace('"S"', '"SS"'), 400, id="no state"),
        pytest.param(news(1).to_json().replace("1.25", "NaN"), 400, id="not a number"),
        pytest.param(news(1).to_json().replace('"rank": 1', '"rank": -1'), 400, id="no rank"),
    ],
)
def test_what_is_not_news_of_this_job_changes_nothing(body: str, status: int) -> None:
    desk = desk_of()
    assert desk.receive(body.encode())[0] == status
    assert desk.seen() == {}


@given(st.binary(max_size=200))
def test_no_body_breaks_the_page(body: bytes) -> None:
    assert desk_of().receive(body)[0] == HTTPStatus.BAD_REQUEST


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[bytes], Response]], RankZero]]:
    """Serve one path as the node of rank 0 does."""
    servers: list[PageServer] = []

    def serve(answer: Callable[[bytes], Response]) -> RankZero:
        routes = {PEERS_PATH: Route("POST", answer, MAX_NEWS_BYTES)}
        servers.append(PageServer(socket.create_server(("127.0.0.1", 0)), routes))
        return RankZero(host="127.0.0.1", port=servers[-1].server_address[1], word=WORD)

    yield serve
    for one in servers:
        one.close()


def test_nodes_with_the_key_of_the_attempt_need_no_secret_of_rank_0(
    serve: Callable[[Callable[[bytes], Response]], RankZero], tmp_path: Path
) -> None:
    config, key = train_config(tmp_path), secrets.token_bytes(32)
    first, second, other = (watch_config(config, 2, {}, one) for one in (key, key, key[:-1]))
    desk, statuses = NewsDesk(first.word), list[HTTPStatus]()

    def receive(body: bytes) -> Response:
        status, text = desk.receive(body)
        statuses.append(status)
        return status, JSON, text.encode()

    to = serve(receive).model_copy(update={"word": ""})
    (tmp_path / RANK_ZERO_FILE).write_text(to.to_json())
    for node in (second, other):
        NodeWatch(node, NodeRanks(tmp_path, [1]), tmp_path).look()
    assert statuses == [HTTPStatus.OK, HTTPStatus.FORBIDDEN]


def test_news_go_over_http(serve: Any) -> None:
    desk = desk_of()
    desk.set_results({3: 1.5}, stall=1)

    def answer(body: bytes) -> Response:
        status, text = desk.receive(body)
        return status, JSON, text.encode()

    reply = send(serve(answer), news(2, 3))
    assert (reply.scores, reply.stall) == ({3: 1.5}, 1)
    assert set(desk.seen()) == {2, 3}


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param((HTTPStatus.FORBIDDEN, JSON, b"{}"), id="a refusal"),
        pytest.param((HTTPStatus.OK, JSON, b'{"version": 2}'), id="another version"),
        pytest.param((HTTPStatus.OK, JSON, b'{"version": 1, "scores": {"2"'), id="cut off"),
    ],
)
def test_an_answer_that_is_none_is_a_value_error(serve: Any, answer: Response) -> None:
    with pytest.raises(ValueError, match=r"status 403|validation error"):
        send(serve(lambda body: answer), news(2))


def test_who_is_no_page_is_told_nothing_twice() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            connection, _ = listener.accept()
            connection.recv(100)
            connection.sendall(b"220 mail.example.com ESMTP\r\n")
            connection.close()

        Thread(target=hang_up, daemon=True).start()
        to = RankZero(host="127.0.0.1", port=listener.getsockname()[1], word=WORD)
        with pytest.raises((OSError, HTTPException)):
            send(to, news(2))
    with pytest.raises(ConnectionRefusedError):
        send(to, news(2))
