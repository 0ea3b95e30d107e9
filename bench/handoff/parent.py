"""The process that started this one: orders come from it as lines, answers go to it, and this one must not outlive it."""

import json
import os
import sys
import threading
import traceback

# Whatever else is printed here, by vLLM's logger for one, is not for the parent.
_answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def tell(answer):
    print(json.dumps(answer), file=_answers, flush=True)


def orders():
    """The lines that it writes, until it closes its end."""
    for line in sys.stdin:
        yield json.loads(line)


def run(role, *arguments):
    """Runs `role` and ends this process with it, at once: the interpreter would put away all of torch and vLLM first."""
    code = 1
    try:
        role(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def end_with_parent():
    """Ends this process once the other end of its standard input is closed, for one that gets no orders there."""

    def wait():
        os.read(0, 1)
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def fork(role):
    """Runs `role` in a copy of this process, which ends with this one. Must be called before there are threads."""
    lifeline, held = os.pipe()
    if os.fork():
        os.close(lifeline)
        # `held` stays open until this process ends, however that happens.
        return
    os.close(held)
    os.dup2(lifeline, 0)
    end_with_parent()
    run(role)
