"""The init process of a pod: a short `sh` script that forwards signals to the trainer. Pure.

Linux drops a signal to PID 1 that has no handler for it, and Python has none before it has loaded
its own libraries. A shell is ready within a few milliseconds. `pod` renders the script; a profile
may set another program, or none.
"""

from collections.abc import Sequence

_SCRIPT = """\
pass() { [ "$_told" ] && [ "$_ready" ] && [ "$_child" ] && _told= && kill -TERM "$_child"; }
trap '_told=1; pass' TERM INT HUP QUIT
trap '_ready=1; pass' USR1
(kill -USR1 ${$}; exec "$@") &
_child=$!
exec 2>/dev/null
pass
_turns=
until [ "$_ready" ] || [ ${#_turns} = 20000 ]; do _turns=.$_turns; done
while kill -0 "$_child"; do
  wait "$_child"
  _code=$?
done
wait "$_child"
_last=$?
case $_last in 127 | -1) ;; *) _code=$_last ;; esac
exit "${_code-$_last}"
"""
# For dash, BusyBox and bash: - A newly forked process has the shell's traps until it has dropped
# them, and signals that arrive   in between are lost. So it reports itself (USR1) when a signal
# would end it or its program. - bash runs a trap that arrives at the very start of `wait` without
# leaving `wait`, and none after   that. So USR1, which arrives just then, is awaited before (1 ms;
# without an extra command,   during which bash drops SIGINT), and no slow command directly precedes
# `wait`. - Every signal becomes SIGTERM, because background processes of a shell ignore SIGINT. - A
# trap interrupts `wait`, whose code is then the signal's. While `kill -0` finds the child, it   has
# not been reaped, and `wait` has more to report. Its last code may still be a signal's:   called
# again, it reports the child's own code or, if already reported, 127 (bash: or -1). - `wait` reaps
# orphans, too. - `${$}` is this shell: the kubelet reduces `$$` to `$`, and replaces `$(NAME)`.


def below_init(init: Sequence[str] | None, command: Sequence[str]) -> list[str]:
    """Return the command of a container.

    Args:
        init: The profile's init program; None for the script above, empty for no init.
        command: The command that it starts. The shell parses none of its text.
    """
    return [*(("sh", "-c", _SCRIPT, "init") if init is None else init), *command]
