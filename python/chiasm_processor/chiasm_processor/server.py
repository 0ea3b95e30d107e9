"""The fork server of one model: imports, reads and warms its processor once, and forks children that have all that.

usage: python -m chiasm_processor [--sandbox off|auto|require] [--address-space BYTES] [limits] -- FLAGS OF VLLM SERVE

Its standard input is a Unix socket to the frontend. It says there what the processor is, and takes orders: ``{"fork": true}``, each
of which comes with the child's own socket. It ends when the frontend hangs up, and its children with it.
"""

import os

# Before anything that starts threads: a process with several can't be forked.
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
from .greeting import greeting  # noqa: E402
from .limits import Limits  # noqa: E402
from .processor import Processor  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(prog="chiasm_processor")
    parser.add_argument("--sandbox", choices=("off", "auto", "require"), default="auto")
    # Bytes that a child may take beyond what it has when it is forked; 0 for no limit.
    parser.add_argument("--address-space", type=int, default=0)
    for name, default in Limits()._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments, flags = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    locked = arguments.sandbox != "off" and (arguments.sandbox == "require" or sandbox.is_available())
    connection = frontend()
    torch.set_num_threads(1)
    try:
        if locked and not sandbox.is_available():
            raise sandbox.NotAvailable("this kernel has no Landlock or no filter of system calls for it is known")
        processor = Processor(flags, Limits(*(getattr(arguments, name) for name in Limits._fields)))
        hello = greeting(processor) | {"sandbox": locked}
    except Exception as error:
        child.send(connection, msgspec.json.encode({"failed": f"{type(error).__name__}: {error}"}))
        sys.exit(1)
    # What is there now is never freed, so that children share its pages.
    gc.collect()
    gc.freeze()
    child.send(connection, msgspec.json.encode(hello))
    take_orders(processor, connection, arguments.address_space, locked)


def frontend() -> socket.socket:
    """The socket that came as standard input, under another number: what is started from here shall not have it."""
    connection = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return connection


def take_orders(processor: Processor, connection: socket.socket, address_space: int, locked: bool) -> None:
    # Whose end is noticed by the frontend, which has their connections, and here when the next order comes.
    children: set[int] = set()
    while (message := child.receive(connection)) is not None:
        if msgspec.json.decode(message.content) == {"fork": True} and message.file is not None:
            try:
                children.add(fork(processor, connection, message.file, address_space, locked))
            except OSError as error:
                # Too many processes, or no memory. The frontend sees this child end before its first word; the others go on.
                print(f"no fork: {error}", file=sys.stderr, flush=True)
            finally:
                os.close(message.file)
        children = {pid for pid in children if os.waitpid(pid, os.WNOHANG) == (0, 0)}
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def fork(processor: Processor, servers: socket.socket, childs: int, address_space: int, locked: bool) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    # Nothing of the server's may run in its child, whatever happens.
    try:
        sandbox.die_with_parent(parent)
        servers.close()
        with contextlib.suppress(ConnectionError):
            child.run(processor, socket.socket(fileno=childs), address_space, locked)
        status = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)
