"""The fork server of a model: imports vLLM, warms up the processor, and forks children with both.

usage: python -m chiasm_processor [--sandbox off|auto|require] [--address-space BYTES] [limits]
       -- FLAGS OF VLLM SERVE

Its standard input is a Unix socket to the frontend. It sends a greeting with the processor's
properties, and receives fork requests: ``{"fork": true}``, each with the child's own socket. It
exits when the frontend disconnects, and its children with it.
"""

import os

# Set before any import that starts threads: a process with several threads cannot be forked.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import argparse  # noqa: E402
import contextlib  # noqa: E402
import gc  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import sys  # noqa: E402

import msgspec  # noqa: E402
import torch  # noqa: E402

from . import child, sandbox  # noqa: E402
from .greeting import build_greeting  # noqa: E402
from .limits import Limits  # noqa: E402
from .processor import Processor  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(prog="chiasm_processor")
    parser.add_argument("--sandbox", choices=("off", "auto", "require"), default="auto")
    # The bytes that a child may map beyond those at the fork; 0 for no limit.
    parser.add_argument("--address-space", type=int, default=0)
    for name, default in Limits()._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments = parser.parse_args(sys.argv[1:split])
    flags = sys.argv[split + 1 :]
    locked = arguments.sandbox == "require" or (
        arguments.sandbox == "auto" and sandbox.is_available()
    )
    connection = take_frontend_socket()
    torch.set_num_threads(1)
    try:
        if locked and not sandbox.is_available():
            raise sandbox.NotAvailable(
                "this kernel has no Landlock or no filter of system calls for it is known"
            )
        limits = Limits(*(getattr(arguments, name) for name in Limits._fields))
        processor = Processor(flags, limits)
        greeting = build_greeting(processor) | {"sandbox": locked}
    except Exception as error:
        failure = {"failed": f"{type(error).__name__}: {error}"}
        child.send(connection, msgspec.json.encode(failure))
        sys.exit(1)
    # The present objects are never freed, so children share their pages.
    gc.collect()
    gc.freeze()
    child.send(connection, msgspec.json.encode(greeting))
    serve_forks(processor, connection, arguments.address_space, locked)


def take_frontend_socket() -> socket.socket:
    """Returns the socket at standard input, and replaces standard input with ``/dev/null``.

    The socket gets another descriptor, so that processes started from here do not inherit it.
    """
    connection = socket.socket(fileno=os.dup(0))
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    return connection


def serve_forks(
    processor: Processor, connection: socket.socket, address_space: int, locked: bool
) -> None:
    """Forks a child for each request until the frontend disconnects, then kills all children."""
    # The frontend, which has the children's connections, detects when a child ends. Here ended
    # children are reaped at the next request.
    children: set[int] = set()
    while (message := child.receive(connection)) is not None:
        if msgspec.json.decode(message.content) == {"fork": True} and message.file is not None:
            try:
                children.add(fork_child(processor, connection, message.file, address_space, locked))
            except OSError as error:
                # There are too many processes, or no memory. The child's connection closes before
                # its first message, so the frontend notices. The other children continue.
                print(f"no fork: {error}", file=sys.stderr, flush=True)
            finally:
                os.close(message.file)
        children = {pid for pid in children if os.waitpid(pid, os.WNOHANG) == (0, 0)}
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def fork_child(
    processor: Processor,
    server_connection: socket.socket,
    child_descriptor: int,
    address_space: int,
    locked: bool,
) -> int:
    """Forks a child that answers calls, and returns its process id."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    # The child must always exit here and never run the server's code.
    try:
        sandbox.die_with_parent(parent)
        server_connection.close()
        with contextlib.suppress(ConnectionError):
            child.run(processor, socket.socket(fileno=child_descriptor), address_space, locked)
        status = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)
