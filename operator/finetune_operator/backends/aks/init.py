"""What a pod starts first: some lines of `sh` that pass signals on to the trainer. Pure.

Linux drops a signal to PID 1 that has no handler for it, and Python has none before it has loaded
its own libraries. A shell is ready within a few milliseconds. `pod` renders it; a profile may name
another program in its place, or none.
"""

from collections.abc import Sequence

_SCRIPT = """\
pass() { [ "$told" ] && [ "$ready" ] && [ "$child" ] && told= && kill -TERM "$child"; }
trap 'again=1 told=1; pass' TERM INT HUP QUIT
trap 'again=1 ready=1; pass' USR1
(kill -USR1 ${$}; exec "$@") &
child=$!
pass
while
  again=
  wait "$child" 2>/dev/null
  new=$?
  case $new in
  127 | -1) [ "${code-138}" != 138 ] || code=$new ;;
  *) code=$new ;;
  esac
  [ "$again" ]
do :; done
exit "$code"
"""
# For dash, BusyBox and bash:
# - A process that was forked just now has the shell's traps until it has dropped them, and what
#   comes meanwhile is lost. So it says itself (USR1) when a signal would end it, or its program.
# - Every signal becomes SIGTERM, as what runs in a shell's background ignores SIGINT.
# - A trap breaks `wait` off, which is then called again; after it has told of an end it answers 127
#   (in bash also -1), and the code that it told before counts, but 138: that is USR1 breaking off.
# - `wait` reaps orphans, too.
# - `${$}` is this shell: the kubelet makes one `$` of two, and replaces `$(NAME)`.


def below_init(init: Sequence[str] | None, command: Sequence[str]) -> list[str]:
    """Return the command of a container.

    Args:
        init: What the profile names; None for the lines above, empty for no init.
        command: What it starts. No text of it is read by the shell.
    """
    return [*(("sh", "-c", _SCRIPT, "init") if init is None else init), *command]
