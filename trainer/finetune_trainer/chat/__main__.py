"""Converse with the models of a run: `python -m finetune_trainer.chat CONFIG`.

`ftctl chat` starts it with the terminal as standard input and output. Errors are printed as one
sentence. Ctrl-C ends the response, a second Ctrl-C the program; Ctrl-D ends the program.
"""

import io
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_trainer.chat.hub import local_copy
from finetune_trainer.chat.screen import OutputClosedError, Screen, note
from finetune_trainer.chat.settings import RunSettings
from finetune_trainer.config import ChatConfig, ModelConfig
from finetune_trainer.control import is_out_of_memory
from finetune_trainer.errors import TrainerError
from finetune_trainer.unused_packages import hide_unused
from finetune_trainer.with_parent import end_with_parent

if TYPE_CHECKING:
    from finetune_trainer.chat.conversation import Conversation

EXIT_FAILED, EXIT_STOPPED, EXIT_UNREAD = 1, 130, 141
_PROMPT = "> "


class Interrupts:
    """Ctrl-C: the first ends the response, the second the program.

    At the prompt it raises KeyboardInterrupt; at any other time it has no effect.
    """

    def __init__(self) -> None:
        self._is_generating = False
        self._is_reading = False
        self._is_stopped = False

    def listen(self) -> None:
        """Handle Ctrl-C from now on."""
        signal.signal(signal.SIGINT, self._hit)

    def read(self, prompt: str) -> str:
        """Return a line of the terminal, or an empty one after Ctrl-C."""
        try:
            self._is_reading = True
            return input(prompt).strip()
        except KeyboardInterrupt:
            print()
            return ""
        finally:
            self._is_reading = False

    def is_stopped(self) -> bool:
        """Whether the current response is to be ended; asking resets it."""
        stopped, self._is_stopped = self._is_stopped, False
        return stopped

    def __enter__(self) -> None:
        self._is_generating, self._is_stopped = True, False

    def __exit__(self, *raised: object) -> None:
        self._is_generating = False

    def _hit(self, *_: object) -> None:
        if self._is_reading:
            self._is_reading = False
            raise KeyboardInterrupt
        if self._is_generating and self._is_stopped:
            raise SystemExit(EXIT_STOPPED)
        self._is_stopped = True


def main(path: str) -> int:
    """Load the models and converse; return the exit code."""
    # ftctl blocks the signal while this process starts; until the models are loaded it kills.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    config = ChatConfig.read(Path(path))
    if sys.platform == "linux":
        end_with_parent(config.parent_pid, signal.SIGTERM)
    _silence_libraries()
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        return _converse(config)
    except OutputClosedError as error:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the flush at exit
        if not str(error):
            return EXIT_UNREAD
        note(str(error))
    except TrainerError as error:
        note(str(error).removeprefix("spec.model.source: "))
    except Exception as error:
        note(_sentence(error))
    return EXIT_FAILED


def _sentence(error: Exception) -> str:
    """Describe an exception of a library without its traceback."""
    if is_out_of_memory(error):
        return "memory is full; end other programs, or set a lower --max-new-tokens"
    *_, last = traceback.extract_tb(error.__traceback__)
    reason = next(iter(str(error).splitlines()), "")
    return f"unexpected {type(error).__name__}: {reason} ({last.filename}, line {last.lineno})"


def _converse(config: ChatConfig) -> int:
    run = RunSettings.of_export(Path(config.trained))
    if config.base is not None:
        config = config.model_copy(update={"base": local_copy(config.base)})
    model = config.base or ModelConfig(path=config.trained)
    hide_unused(run.of("base").train_config(model, "fp32"))

    from finetune_trainer.chat.conversation import Conversation
    from finetune_trainer.chat.models import load

    interrupts = Interrupts()
    models = load(config, run)
    conversation = Conversation(
        models,
        Screen(sys.stdout),
        interrupts.is_stopped,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        system=config.system,
    )
    conversation.check_system()
    conversation.prepare()
    if models.tokenizer.chat_template is None:
        note("the model has no chat template: it continues each text")
    if config.prompts or not sys.stdin.isatty():
        for number, question in enumerate(config.prompts or _lines()):
            if number:
                conversation.screen.gap()
            conversation.screen.question(question)
            conversation.ask(question)
        return 0
    return _prompt_user(conversation, interrupts)


def _prompt_user(conversation: "Conversation", interrupts: Interrupts) -> int:
    """Read questions from the terminal until Ctrl-D."""
    with suppress(ImportError):
        import readline  # noqa: F401  # editing and history for `input`
    note("Ctrl-C ends a response, Ctrl-D the program\n")
    interrupts.listen()
    while True:
        try:
            question = interrupts.read(_PROMPT)
            if question:
                with interrupts:
                    conversation.ask(question)
                conversation.screen.gap()
        except EOFError:
            conversation.screen.gap()
            return 0
        except TrainerError as error:
            note(str(error))


def _lines() -> Iterator[str]:
    """Yield the lines of standard input that are not empty."""
    for line in sys.stdin:
        if question := line.strip():
            yield question


def _silence_libraries() -> None:
    """Suppress log lines, warnings and progress bars; errors are exceptions."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
