"""A conversation with several models: histories, limits, refusals, and the text on the screen."""

import io
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from finetune_trainer.chat.conversation import Conversation
from finetune_trainer.chat.models import Models, load
from finetune_trainer.chat.screen import OutputClosedError, Screen, printable
from finetune_trainer.chat.settings import RunSettings
from finetune_trainer.config import ChatConfig, ModelConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.generation import decode, encode, generate
from support.data.text_fixtures import CHATML_TEMPLATE, tiny_model
from support.model.scripted import scripted_model

QUESTIONS = ("What is a list?", "And a tuple?", "Who are you?")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Two models with other weights."""
    folder = tmp_path_factory.mktemp("pair")
    return models_of(tiny_model(folder / "trained"), tiny_model(folder / "base", seed=1))


def models_of(trained: Path, base: Path | None = None) -> Models:
    config = ChatConfig(
        trained=str(trained),
        base=ModelConfig(path=str(base)) if base else None,
        parent_pid=1,
    )
    return load(config, RunSettings())


def conversation(models: Models, **options: Any) -> tuple[Conversation, io.StringIO]:
    out = io.StringIO()
    settings = {"max_new_tokens": 12, **options}
    return Conversation(models, Screen(out), lambda: False, **settings), out


def test_each_model_continues_its_own_history(pair: Models) -> None:
    talk, out = conversation(pair)
    talk.prepare()
    for question in QUESTIONS:
        talk.ask(question)

    expected = {}
    for voice in pair.voices:
        turns: list[dict[str, str]] = []
        for question in QUESTIONS:
            turns.append({"role": "user", "content": question})
            found = generate(
                voice.model,
                pair.tokenizer,
                encode(pair.tokenizer, turns),
                stops=pair.stops,
                max_new_tokens=12,
            )
            turns.append({"role": "assistant", "content": decode(pair.tokenizer, found.tokens)})
        expected[voice.name] = [turn["content"] for turn in turns[1::2]]
    lines = [
        f"{name}: {printable(expected[name][number])}\n"
        for number in range(len(QUESTIONS))
        for name in ("base", "trained")
    ]
    assert out.getvalue() == "".join(lines)
    assert len({*lines}) == len(lines)


def test_a_stopped_response_stays_in_the_history(tmp_path: Path) -> None:
    models = models_of(scripted_model(tmp_path / "model", "abc de fg"))
    out, calls = io.StringIO(), iter([False, False, True])
    talk = Conversation(models, Screen(out), lambda: next(calls, False), max_new_tokens=50)
    talk.ask("Who?")
    first = out.getvalue()
    talk.ask("Who?")
    assert first != "trained: abc de fg\n"
    assert "trained: abc de fg".startswith(first.strip())
    assert out.getvalue() == f"{first}trained: abc de fg\n"


def test_old_turns_are_dropped_if_the_model_has_no_room(tmp_path: Path) -> None:
    models = models_of(scripted_model(tmp_path / "model", "abc de fg"))
    [voice] = models.voices
    short = type(voice)(voice.name, voice.model, nullcontext, 40, voice.ends)
    talk, out = conversation(Models([short], models.tokenizer, models.stops))
    for _ in range(5):
        talk.ask("Who are you?")
    assert out.getvalue() == "trained: abc de fg\n" * 5
    with pytest.raises(ConfigError, match=r"the question has \d+ tokens .* and trained takes 40"):
        talk.ask("Who are you? " * 20)
    talk.ask("Who are you?")
    assert out.getvalue() == "trained: abc de fg\n" * 6


def test_a_system_turn_without_an_effect_is_refused(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    models = models_of(folder)
    conversation(models, system="Be brief.")[0].check_system()
    talk, _ = conversation(models, system="Be brief.")
    models.tokenizer.chat_template = CHATML_TEMPLATE.replace(
        "messages %}", "messages if message['role'] != 'system' %}"
    )
    with pytest.raises(ConfigError, match="chat template has no system turn"):
        talk.check_system()
    models.tokenizer.chat_template = "{{ raise_exception('no system turns') }}"
    with pytest.raises(ConfigError, match="refuses the conversation: no system turns"):
        talk.check_system()
    models.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="the model has no chat template"):
        talk.check_system()


def test_a_model_without_a_template_continues_each_text(tmp_path: Path) -> None:
    models = models_of(scripted_model(tmp_path / "model", "abc de fg"))
    models.tokenizer.chat_template = None
    talk, out = conversation(models)
    talk.ask("abc")
    talk.ask("abc de")
    assert out.getvalue() == "trained: de fg\ntrained: fg\n"


def test_sampling_follows_the_temperature(pair: Models) -> None:
    texts = set()
    for temperature in (0.0, 0.0, 1.5, 1.5):
        talk, out = conversation(pair, temperature=temperature)
        talk.ask("Who?")
        texts.add(out.getvalue())
    assert len(texts) == 3


def test_characters_of_several_tokens_are_written_once_they_are_whole(tmp_path: Path) -> None:
    models = models_of(scripted_model(tmp_path / "model", "a→日"))
    pieces: list[str] = []

    class Recorded(Screen):
        def text(self, piece: str) -> None:
            pieces.append(piece)

    Conversation(models, Recorded(io.StringIO()), lambda: False, max_new_tokens=50).ask("Who?")
    assert "".join(pieces) == "a→日"
    assert not any("\ufffd" in piece for piece in pieces)


def test_the_first_token_appears_long_before_the_last(tmp_path: Path) -> None:
    models = models_of(scripted_model(tmp_path / "model", "abc de fg", is_endless=True))
    times: list[float] = []

    class Timed(Screen):
        def begin(self, label: str) -> None:
            times.append(perf_counter())

        def text(self, piece: str) -> None:
            times.append(perf_counter())

    Conversation(models, Timed(io.StringIO()), lambda: False, max_new_tokens=200).ask("Who?")
    begin, first, *_, last = times
    assert first - begin <= 0.2 * (last - begin)
    assert len(times) > 100


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("\x1b[31mred\x1b[0m", "\ufffd[31mred\ufffd[0m", id="escape sequence"),
        pytest.param("\x9b2J\x90q\x7f\x08", "\ufffd2J\ufffdq\ufffd\ufffd", id="C1 and others"),
        pytest.param("one\r\ntwo\rthree\n\t4", "one\ntwo\ufffdthree\n\t4", id="line breaks"),
        pytest.param("naïve → 日本 🙂", "naïve → 日本 🙂", id="text"),
    ],
)
def test_control_characters_do_not_reach_the_terminal(text: str, expected: str) -> None:
    assert printable(text) == expected


def test_a_closed_output_ends_the_response(pair: Models) -> None:
    class Closed(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    talk = Conversation(pair, Screen(Closed()), lambda: False, max_new_tokens=4)
    with pytest.raises(OutputClosedError):
        talk.ask("Who?")
