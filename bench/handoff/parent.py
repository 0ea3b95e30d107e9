"""Communication with the parent process, with one JSON object per line, and processes that end
with their parent."""

import json
import os
import sys
import threading
import traceback

# Other output, such as vLLM's log, goes to standard error.
_answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def send(answer):
    print(json.dumps(answer), file=_answers, flush=True)


def orders():
    """Yields the orders of the parent until it closes its end."""
    for line in sys.stdin:
        yield json.loads(line)


def run(main, *arguments):
    """Runs `main`, then ends this process without the interpreter's clean-up, which would release
    all of torch and vLLM."""
    code = 1
    try:
        main(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def end_with_parent():
    """Ends this process when its standard input is closed, for a process without orders."""

    def wait():
        os.read(0, 1)
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def fork(main):
    """Runs `main` in a copy of this process, which ends with this one. Must be called before the
    process has threads."""
    lifeline, held = os.pipe()
    if os.fork():
        os.close(lifeline)
        # `held` stays open until this process ends in any way.
        return
    os.close(held)
    os.dup2(lifeline, 0)
    end_with_parent()
    run(main)
