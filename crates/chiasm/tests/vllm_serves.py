"""Runs many `vllm serve` processes after importing vLLM once, because the import is slow.

Reads one JSON object per line: `arguments` after `vllm serve`, `python_path`, a folder with more
modules or null, and `quiet`, which discards the output. Starts the server in its own process group
and prints the group's id. At the end of stdin it kills all servers and exits.

Differences from `vllm serve`: the server and its engine are forks of this process, where vLLM on
CPU would start new processes. Model classes are inspected in the process itself instead of in a
short-lived one.
"""

import json
import os
import signal
import sys

# Threads do not survive a fork, so OpenMP must not start any before the engine forks from its
# server.
os.environ["OMP_NUM_THREADS"] = "1"

# Imported for the forked processes.
import vllm.entrypoints.cli.main  # noqa: E402
import vllm.entrypoints.cli.serve  # noqa: E402
import vllm.entrypoints.openai.api_server  # noqa: E402
import vllm.v1.engine.async_llm  # noqa: E402
import vllm.v1.engine.core  # noqa: E402
import vllm.v1.executor.multiproc_executor  # noqa: E402
import vllm.v1.worker.cpu_worker  # noqa: E402, F401
from vllm.model_executor.models import registry  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402


def fork_engines():
    """Makes vLLM fork engines, and inspect model classes in the same process."""
    check = CpuPlatform.check_and_update_config.__func__

    def check_and_fork(cls, config):
        check(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check_and_fork)
    registry._run_in_subprocess = lambda inspect: inspect()


def serve(arguments, python_path, quiet):
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing if quiet else 2, 1)
    os.dup2(nothing if quiet else 2, 2)
    if python_path:
        sys.path.insert(0, python_path)
    sys.argv = ["vllm", "serve", *arguments]
    vllm.entrypoints.cli.main.main()


def main():
    fork_engines()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    servers = []
    for line in sys.stdin:
        server = os.fork()
        if server == 0:
            serve(**json.loads(line))
            os._exit(0)
        servers.append(server)
        print(server, flush=True)
    for server in servers:
        try:
            os.killpg(server, signal.SIGKILL)
        except ProcessLookupError:
            pass


if __name__ == "__main__":
    main()
