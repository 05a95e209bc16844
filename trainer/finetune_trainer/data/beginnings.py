"""Render every beginning of a conversation in one pass over it.

Called by `turns`, which asks what the template makes of the first k messages, for many k. A
template is a program: what it makes of a beginning is known from a pass over the whole conversation
only if until there it has read nothing of what follows. So it is given messages that note what is
read of them (`_Messages`), and is changed in one place: before each message its loop also writes
what the template would write behind the loop if the conversation ended there. What was read too
early is not given back, and has to be rendered by itself. Why this is the same:
docs/decisions/0072-tokens-are-made-once.md.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from finetune_trainer.data.formats import Message

if TYPE_CHECKING:
    from jinja2 import Environment, Template, nodes

Span = tuple[int, int]

PASS = "finetune_trainer_pass"  # the variable of a template that holds the `_Pass`
_EVERYTHING = 1 << 60  # read, where the number of messages was
# What is not the same twice, or remembers what it was asked before.
_NOT_PURE = frozenset({"cycler", "joiner", "lipsum", "self", PASS})
# These return iterators, which are exhausted by whoever is first.
_CHOOSING = ("reject", "rejectattr", "select", "selectattr")
_LAZY = frozenset(("batch", "items", "map", "reverse", "slice", "unique", *_CHOOSING))
_CALLED = ("over", "ends", "ended", "has_other", "other", "other_ended", "goes_on")  # of a `_Pass`


class NotProvenError(Exception):
    """The template does something with its messages that no note is taken of."""


@dataclass(frozen=True)
class Beginning:
    """What a template makes of a beginning: so many characters of the whole, and an end."""

    length: int
    end: str
    marks: tuple[Span, ...] = ()


@dataclass
class Beginnings:
    """What one pass has found.

    Attributes:
        whole: The text of the whole conversation.
        texts: By number of messages, those that are proven.
        others: By message, the text that ends with another one in its place.
    """

    whole: str = ""
    texts: dict[int, Beginning] = field(default_factory=dict)
    others: dict[int, Beginning] = field(default_factory=dict)

    def text(self, count: int) -> str | None:
        """Return the text of the first `count` messages; None where it is not proven."""
        return self._joined(self.texts.get(count))

    def other(self, turn: int) -> str | None:
        """Return the text up to a message that was replaced by another."""
        return self._joined(self.others.get(turn))

    def marks(self, count: int) -> list[Span] | None:
        """Return what generation marks enclose in that text."""
        found = self.texts.get(count)
        return None if found is None else list(found.marks)

    def _joined(self, found: Beginning | None) -> str | None:
        return None if found is None else self.whole[: found.length] + found.end


def instrument(environment: "Environment", source: str) -> "Template | None":
    """Return the template that a pass runs; None where its form is not one that is understood."""
    from jinja2 import nodes

    tree, copied, copied_again = (environment.parse(source) for _ in range(3))
    places = [at for at, node in enumerate(tree.body) if isinstance(node, nodes.For)]
    if not places or not _is_pure(tree):
        return None
    place = places[-1]
    loop = tree.body[place]
    assert isinstance(loop, nodes.For)
    if loop.test or loop.else_ or loop.recursive or not isinstance(loop.target, nodes.Name):
        return None
    if not _is_independent(tree.body[place + 1 :], loop):
        return None
    target, messages = loop.target.name, loop.iter
    assert isinstance(messages, nodes.Expr)
    again = copied.body[place]
    assert isinstance(again, nodes.For)
    end, end_again = copied.body[place + 1 :], copied_again.body[place + 1 :]
    loop.iter = _call("over", messages)
    loop.body = [
        nodes.If(_call("ends"), [nodes.With([], [], [*end, _output("ended")])], [], []),
        nodes.If(
            _call("has_other"),
            [
                nodes.With(
                    [nodes.Name(target, "param")],
                    [_call("other")],
                    [*again.body, *end_again, _output("other_ended")],
                )
            ],
            [],
            [],
        ),
        *loop.body,
        _output("goes_on"),
    ]
    for node in tree.find_all(nodes.Node):
        node.lineno = getattr(node, "lineno", None) or 1
    tree.set_environment(environment)
    environment.filters |= {f"{PASS}_{name}": getattr(_Pass, name) for name in _CALLED}
    return environment.from_string(tree)


def render_beginnings(
    template: "Template",
    messages: Sequence[Message],
    *,
    counts: frozenset[int],
    others: Mapping[int, Message],
    variables: Mapping[str, Any],
    is_marked: bool,
) -> Beginnings:
    """Run an instrumented template once.

    Raises:
        Exception: whatever the template raises; NotProvenError among it.
    """
    run = _Pass(messages, counts, others, template.environment.globals["namespace"])
    given = {**variables, "messages": run.messages, "namespace": run.namespace, PASS: run}
    context = template.new_context(given)
    tracker: Any = nullcontext()
    if is_marked:
        activate: Any = template.environment
        tracker = activate.activate_tracker(run.out, run.marks)
    with tracker:
        for chunk in template.root_render_func(context):
            run.out.append(chunk)
    return run.found()


class _Messages:
    """The messages from `start` on, as a template sees them; notes the last one it has read."""

    def __init__(self, run: "_Pass", start: int) -> None:
        self._run = run
        self._start = start

    def __getitem__(self, key: Any) -> Any:
        every, start = self._run.every, self._start
        if isinstance(key, slice):
            first = key.start or 0
            if key.stop is not None or key.step not in (None, 1) or first < 0:
                raise NotProvenError("a slice that ends")
            return _Messages(self._run, start + first)
        if not isinstance(key, int) or key < 0:
            raise NotProvenError("an index from the end")
        self._run.read(start + key)
        return every[start + key]

    def __iter__(self) -> Iterator[Message]:
        for at in range(self._start, len(self._run.every)):
            self._run.read(at)
            yield self._run.every[at]
        self._run.read(_EVERYTHING)

    def __bool__(self) -> bool:
        self._run.read(self._start)
        return self._start < len(self._run.every)

    def __len__(self) -> int:
        self._run.read(_EVERYTHING)
        return max(0, len(self._run.every) - self._start)

    def turns(self) -> "_Turns":
        """Return what the loop runs over."""
        return _Turns(self._run, self._start)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotProvenError(f"messages.{name}")

    def _refuse(self, *args: Any) -> Any:
        raise NotProvenError("messages as a value")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __contains__ = __reversed__ = _refuse
    __str__ = __repr__ = __format__ = __hash__ = _refuse


class _Turns:
    """The messages that the loop runs over; looking ahead is noted, and remembered by the loop."""

    def __init__(self, run: "_Pass", start: int) -> None:
        self._run = run
        self._next = run.at = start

    def __iter__(self) -> "_Turns":
        return self

    def __next__(self) -> Message:
        at, every = self._next, self._run.every
        if at > self._run.at:
            self._run.looked_ahead = max(self._run.looked_ahead, at)
        if at >= len(every):
            raise StopIteration
        self._next += 1
        return every[at]

    def __len__(self) -> int:
        self._run.looked_ahead = _EVERYTHING
        return len(self._run.every) - self._next


class _Pass:
    """One run of a template: what it has written, and what it has read for that."""

    def __init__(
        self,
        messages: Sequence[Message],
        counts: frozenset[int],
        others: Mapping[int, Message],
        namespace: Any,
    ) -> None:
        self.every = messages
        self.messages = _Messages(self, 0)
        self.out: list[str] = []
        self.marks: list[Span] = []
        self.at = -1  # the message that the loop is at
        self.last_read = self.looked_ahead = -1
        self._counts, self._others = counts, others
        self._make_namespace = namespace
        self._namespaces: list[dict[str, Any]] = []
        self._found = Beginnings()
        self._counted, self._length = 0, 0
        self._kept: tuple[int, int, list[dict[str, Any]]]
        self._loops = 0

    def namespace(self, *args: Any, **attributes: Any) -> Any:
        """Make a namespace, the only thing that a template can change."""
        made = self._make_namespace(*args, **attributes)
        self._namespaces.append(made._Namespace__attrs)
        return made

    def read(self, at: int) -> None:
        """Note that a message was read, or that there is none."""
        self.last_read = max(self.last_read, at)

    def over(self, messages: Any) -> _Turns:
        """Return what the loop runs over."""
        self._loops += 1
        if not isinstance(messages, _Messages) or self._loops > 1:
            raise NotProvenError("a loop over something else")
        return messages.turns()

    def ends(self) -> bool:
        """Say whether it is asked what is written if the conversation ends here."""
        return self._begin(self.at in self._counts)

    def ended(self) -> str:
        """Take what was written."""
        self._take(self._found.texts)
        return ""

    def has_other(self) -> bool:
        """Say whether it is asked what is written if it ends with another message."""
        return self._begin(self.at in self._others)

    def other(self) -> Message:
        """Return that message."""
        return self._others[self.at]

    def other_ended(self) -> str:
        """Take what was written."""
        self._take(self._found.others)
        return ""

    def goes_on(self) -> str:
        """Let the loop go to the next message."""
        self.at += 1
        return ""

    def found(self) -> Beginnings:
        """Return everything, at the end of the pass."""
        made = self._found
        made.whole = "".join(self.out)
        whole = Beginning(len(made.whole), "", tuple(self.marks))
        if len(self.every) in self._counts:
            made.texts[len(self.every)] = whole
        return made

    def _is_proven(self) -> bool:
        return max(self.last_read, self.looked_ahead) < self.at

    def _begin(self, is_asked: bool) -> bool:
        if not is_asked or not self._is_proven():
            return False
        attributes = [dict(one) for one in self._namespaces]
        self._kept = (len(self.out), len(self.marks), attributes)
        self._read_before = self.last_read
        return True

    def _take(self, into: dict[int, Beginning]) -> None:
        """Keep what was written since `_begin`, and undo everything else."""
        written, marked, attributes = self._kept
        if self._is_proven():
            self._length += sum(map(len, self.out[self._counted : written]))
            self._counted = written
            end = "".join(self.out[written:])
            into[self.at] = Beginning(self._length, end, tuple(self.marks))
        del self.out[written:], self.marks[marked:]
        for own, before in zip(self._namespaces, attributes, strict=False):
            own.clear()
            own.update(before)
        self.last_read = self._read_before


def _is_pure(tree: "nodes.Template") -> bool:
    """Whether two runs over the same messages do the same, but for what namespaces hold."""
    from jinja2 import nodes

    parts = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)
    if any(tree.find_all(parts)):
        return False
    names = {node.name for node in tree.find_all(nodes.Name)}
    changing = {node.attr for node in tree.find_all(nodes.Getattr)}
    changing |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    filters = list(tree.find_all(nodes.Filter))
    used_up = {id(node.node) for node in filters} | {id(n.iter) for n in tree.find_all(nodes.For)}
    return (
        names.isdisjoint(_NOT_PURE)
        and "changed" not in changing
        and all(node.name != "random" for node in filters)
        and all(node.name not in _LAZY or id(node) in used_up for node in filters)
    )


def _is_independent(end: "list[nodes.Node]", loop: "nodes.For") -> bool:
    """Whether what is behind the loop may be run within it, and its body twice."""
    from jinja2 import nodes

    inside, behind = nodes.Template(loop.body), nodes.Template(end)
    leaving = (nodes.Break, nodes.Continue, nodes.Macro)
    if any(inside.find_all(leaving)) or any(behind.find_all(nodes.Macro)):
        return False
    stored = {node.name for node in inside.find_all(nodes.Name) if node.ctx != "load"}
    stored |= {"loop", *(node.name for node in loop.target.find_all(nodes.Name))}
    stored.add(getattr(loop.target, "name", "loop"))
    used = {node.name for node in behind.find_all(nodes.Name)}
    used |= {node.name for node in behind.find_all(nodes.NSRef)}
    return stored.isdisjoint(used)


def _call(name: str, *given: "nodes.Expr") -> "nodes.Filter":
    """Call the pass as a filter: a method would go through the sandbox, at four times the time."""
    from jinja2 import nodes

    return nodes.Filter(nodes.Name(PASS, "load"), f"{PASS}_{name}", list(given), [], None, None)


def _output(name: str) -> "nodes.Output":
    from jinja2 import nodes

    return nodes.Output([_call(name)])
