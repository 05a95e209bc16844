"""Put a question to each model and stream the responses; each model continues its own history.

`__main__` calls it. Generation, template and stop tokens are the same as for the sample prompts of
a run (`generation`).
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from finetune_trainer.chat.models import Models, Voice
from finetune_trainer.chat.screen import OutputClosedError, Screen
from finetune_trainer.control import is_out_of_memory
from finetune_trainer.data.formats import Message
from finetune_trainer.errors import ConfigError, TrainerError
from finetune_trainer.generation import Generated, decode, encode, generate

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import BatchEncoding, Cache, PreTrainedTokenizerBase


class _StoppedError(Exception):
    """The user has stopped the response."""


@dataclass
class Stream:
    """Receives the tokens of one response and writes their text as soon as it is final.

    Attributes:
        write: Receives each new piece of text.
        is_stopped: Whether to end the response.
        tokens: The generated tokens.
    """

    tokenizer: "PreTrainedTokenizerBase"
    write: Callable[[str], None]
    is_stopped: Callable[[], bool]
    tokens: list[int] = field(default_factory=list)
    _written: int = 0
    _has_prompt: bool = False

    def put(self, value: "Tensor") -> None:
        """Take the prompt, which comes first, or new tokens."""
        if self._has_prompt:
            self.tokens += value.flatten().tolist()
            # The last character may lack bytes, and white space at the end is not printed.
            self._write_up_to(decode(self.tokenizer, self.tokens).rstrip("\ufffd").rstrip())
        self._has_prompt = True
        if self.is_stopped():
            raise _StoppedError

    def end(self) -> None:
        """Write the rest."""
        self._write_up_to(decode(self.tokenizer, self.tokens))

    def _write_up_to(self, text: str) -> None:
        if len(text) > self._written:
            self.write(text[self._written :])
            self._written = len(text)


@dataclass(frozen=True)
class _Memory:
    """The state of a conversation with one model.

    Attributes:
        turns: All turns.
        cache: Keys and values of the last prompt and response; None after a stopped response.
        tokens: Tokens of that prompt and response.
    """

    turns: list[Message] = field(default_factory=list)
    cache: "Cache | None" = None
    tokens: list[int] = field(default_factory=list)

    def cache_for(self, prompt: list[int]) -> "Cache | None":
        """Return the cache cut to the tokens that the next prompt starts with.

        Without it, the time to the first token grows with the conversation. Sliding windows and
        recurrent states cannot be cut.
        """
        from transformers.cache_utils import DynamicLayer

        if self.cache is None or {type(layer) for layer in self.cache.layers} != {DynamicLayer}:
            return None
        length = self.cache.get_seq_length()
        shared = _common_length(self.tokens[:length], prompt[:-1])
        if shared < length:
            self.cache.crop(shared - length)
        return self.cache if shared else None


@dataclass
class Conversation:
    """The histories of all models, and the settings of the generation.

    Attributes:
        models: The models that respond, with their tokenizer.
        screen: Receives the responses.
        is_stopped: Whether the user has stopped the current response.
        max_new_tokens: Largest number of tokens of a response.
        temperature: Temperature of the sampling; 0 is greedy.
        system: Text of the system turn.
    """

    models: Models
    screen: Screen
    is_stopped: Callable[[], bool]
    max_new_tokens: int
    temperature: float = 0.0
    system: str | None = None
    _memories: dict[str, "_Memory"] = field(default_factory=dict)

    def check_system(self) -> None:
        """Refuse a system turn that would have no effect.

        Raises:
            ConfigError: there is no chat template, or it leaves the system turn out.
        """
        if self.system is None:
            return
        if self.models.tokenizer.chat_template is None:
            raise ConfigError(
                "--system has no effect: the model has no chat template and continues each text; "
                "leave it out"
            )
        turns = [_turn("system", self.system), _turn("user", "Hello")]
        with _explained():
            text = str(self.models.tokenizer.apply_chat_template(turns, tokenize=False))
        if self.system.strip() not in text:
            raise ConfigError(
                "--system has no effect: the model's chat template has no system turn; leave it out"
            )

    def prepare(self) -> None:
        """Compute the beginning that the template gives to all prompts, before the first question.

        A CPU needs several times as long for a prompt as for a token. Elsewhere, and with fewer
        than 32 bits, the first prompt is computed at once, so that it is rounded as in the run.
        """
        if self.models.tokenizer.chat_template is None:
            return
        first, second = (self._prompt([_turn("user", text)]) for text in ("a", "b"))
        tokens: list[int] = first["input_ids"][0].tolist()
        shared = _common_length(tokens, second["input_ids"][0].tolist())
        for voice in self.models.voices:
            if shared and voice.is_precise_on_cpu:
                beginning = type(first)({name: one[:, :shared] for name, one in first.items()})
                with voice.active():
                    cache = self._generate(voice, beginning, max_new_tokens=1).cache
                self._memories[voice.name] = _Memory([], cache, tokens[:shared])

    def ask(self, question: str) -> None:
        """Stream the response of each model to a question.

        Raises:
            ConfigError: the template refuses the conversation, or the question is too long.
            OutputClosedError: the output can no longer be written.
        """
        for voice in self.models.voices:
            self._respond(voice, question)

    def _respond(self, voice: Voice, question: str) -> None:
        tokenizer = self.models.tokenizer
        memory = self._memories.get(voice.name, _Memory())
        history = memory.turns if tokenizer.chat_template else []
        turns, inputs, room = self._fit(voice, [*history, _turn("user", question)])
        prompt: list[int] = inputs["input_ids"][0].tolist()
        self.screen.begin(voice.name)
        stream = Stream(tokenizer, self.screen.text, self.is_stopped)
        limit, remark, known = min(self.max_new_tokens, room), "", memory.cache_for(prompt)
        self._memories[voice.name] = _Memory(
            memory.turns
        )  # an exception leaves a part in the cache
        cache = None
        try:
            with voice.active():
                cache = self._generate(voice, inputs, limit, stream, known).cache
            if len(stream.tokens) == limit and stream.tokens[-1] not in voice.ends:
                option = "--max-new-tokens sets the limit" if limit < room else "the model's limit"
                remark = f"cut after {limit} tokens; {option}"
        except _StoppedError:
            stream.end()
            remark = "stopped"
        except (OutputClosedError, TrainerError):
            raise
        except Exception as error:  # of the model's class
            if is_out_of_memory(error):
                raise
            reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            raise ConfigError(f"{voice.name} cannot respond ({reason})") from error
        response = decode(tokenizer, stream.tokens)
        if not response:
            self.screen.text("-")
        self.screen.end(remark)
        turns = [*turns, _turn("assistant", response)]
        self._memories[voice.name] = _Memory(turns, cache, [*prompt, *stream.tokens])

    def _generate(
        self,
        voice: Voice,
        inputs: "BatchEncoding",
        max_new_tokens: int,
        stream: Stream | None = None,
        cache: "Cache | None" = None,
    ) -> Generated:
        return generate(
            voice.model,
            self.models.tokenizer,
            inputs,
            stops=self.models.stops,
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            streamer=stream,
            cache=cache,
        )

    def _fit(
        self, voice: Voice, turns: list[Message]
    ) -> tuple[list[Message], "BatchEncoding", int]:
        """Return the turns, their prompt and the room behind it; drop old turns that do not fit."""
        while True:
            inputs = self._prompt(turns)
            length = inputs["input_ids"].shape[1]
            room = sys.maxsize if voice.context is None else voice.context - length
            if room > 0:
                return turns, inputs, room
            if len(turns) == 1:
                raise ConfigError(
                    f"the question has {length} tokens with its template, and {voice.name} takes "
                    f"{voice.context}; shorten it"
                )
            turns = turns[2:]

    def _prompt(self, turns: list[Message]) -> "BatchEncoding":
        system = [_turn("system", self.system)] if self.system is not None else []
        with _explained():
            return encode(self.models.tokenizer, [*system, *turns])


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@contextmanager
def _explained() -> Iterator[None]:
    """Convert an exception of a chat template, which is a program and may raise anything."""
    try:
        yield
    except Exception as error:
        message = f"the model's chat template refuses the conversation: {error}"
        raise ConfigError(message) from error


def _turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}
