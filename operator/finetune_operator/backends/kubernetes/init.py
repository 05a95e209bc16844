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
# The script works in dash, BusyBox and bash:
# - A new child inherits the shell's traps and loses signals that arrive before it resets them.
#   It therefore reports itself (USR1) when a signal would end it or its program.
# - bash runs a trap at the very start of `wait` without leaving `wait`, and runs none after that.
#   USR1, which arrives at this moment, is therefore awaited before `wait`: for 1 ms, during which
#   bash would drop SIGINT without the extra command. No slow command directly precedes `wait`.
# - Every signal is forwarded as SIGTERM, because background processes of a shell ignore SIGINT.
# - A trap interrupts `wait`, which then returns the signal's code. While `kill -0` finds the child,
#   it is not reaped, and `wait` has more to return. Its last code may still be a signal's: the next
#   call returns the child's own code or, if that was already returned, 127 (bash: or -1).
# - `wait` reaps orphans, too.
# - `${$}` is this shell. The kubelet reduces `$$` to `$`, and replaces `$(NAME)`.


def below_init(init: Sequence[str] | None, command: Sequence[str]) -> list[str]:
    """Return the command of a container.

    Args:
        init: The profile's init program; None for the script above, empty for no init.
        command: The command that it starts. The shell parses none of its text.
    """
    return [*(("sh", "-c", _SCRIPT, "init") if init is None else init), *command]
