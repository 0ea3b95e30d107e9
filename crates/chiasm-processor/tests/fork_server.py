#!/usr/bin/env python3
"""A scripted fork server without vLLM.

The item's file selects the behaviour of the child: `make`, `wait PATH` (creates PATH.begun and
waits for PATH), `hang`, `die`, `lie`, `babble` or `refuse`. For a video it is `honest`, or one of
the words in `send_frames`; the bytes of a frame are its position.

The flag after the model selects the behaviour of the server: `serve`, `fail`, `vanish`,
`second-fork-fails`, or `log=FOLDER`. The last one records each start in FOLDER, blocks every start
but the first until FOLDER/go exists, and fails once FOLDER/fail exists.
"""

import itertools
import json
import mmap
import os
import signal
import socket
import struct
import sys
import time


def send(connection, message):
    content = message if isinstance(message, bytes) else json.dumps(message).encode()
    connection.sendall(struct.pack("<I", len(content)) + content)


def receive(connection):
    header, files, _, _ = socket.recv_fds(connection, 4, 1)
    if len(header) < 4:
        sys.exit(0)
    content = b""
    (length,) = struct.unpack("<I", header)
    # Reads no byte of the next message, because its file would be lost.
    while len(content) < length:
        content += connection.recv(length - len(content))
    return json.loads(content), files


def tensor(length, shape):
    return {"dtype": "uint8", "shape": shape, "offset": length, "length": 4}


def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.005)


def record_start(folder):
    starts = os.path.join(folder, "starts")
    with open(starts, "a") as file:
        file.write(f"{os.getpid()}\n")
    with open(starts) as file:
        count = len(file.readlines())
    if count > 1:
        open(os.path.join(folder, "restarted"), "w").close()
        wait_for(os.path.join(folder, "go"))


def send_frames(connection, call, memory):
    length, slots = call["length"], call["slots"]
    frame_bytes = call["width"] * call["height"] * 3
    behaviour = os.pread(memory, length, 0).decode()
    for number, position in enumerate(call["positions"]):
        if number >= slots:
            assert receive(connection) == ({"call": "taken"}, [])
        offset = length + number % slots * frame_bytes
        os.pwrite(memory, bytes([position]) * frame_bytes, offset)
        if number == 1:
            match behaviour:
                case "position":
                    position += 1
                case "offset":
                    offset += 1
                case "outside":
                    offset = 1 << 40
                case "truncate":
                    os.truncate(memory, length)
                    send(connection, {"reply": "frame", "position": position, "offset": offset})
                    time.sleep(3600)
                case "early":
                    break
                case "different":
                    return send(connection, {"reply": "different", "reason": "one frame"})
                case "refuse":
                    return send(connection, {"reply": "refused", "reason": "ValueError: too big"})
                case "babble":
                    return send(connection, b"not JSON")
                case "expand":
                    return send(
                        connection, {"reply": "expanded", "token_ids": [], "placeholders": []}
                    )
                case "die":
                    os._exit(1)
                case "hang":
                    time.sleep(3600)
        send(connection, {"reply": "frame", "position": position, "offset": offset})
    if behaviour == "late":
        send(connection, {"reply": "frame", "position": position, "offset": offset})
    send(connection, {"reply": "decoded"})


def answer(connection, call, files):
    if call["call"] == "frames":
        send_frames(connection, call, files[0])
        return os.close(files[0])
    if call["call"] == "prompt":
        items = [{"offset": offset, "length": 1} for offset, _ in enumerate(call["items"])]
        return send(
            connection, {"reply": "expanded", "token_ids": call["token_ids"], "placeholders": items}
        )
    with mmap.mmap(files[0], 0) as memory:
        length = call["length"]
        behaviour, *arguments = memory[:length].decode().split()
        memory[length : length + 4] = b"\1\2\3\4"
    os.close(files[0])
    shape = [5] if behaviour == "lie" else [4]
    if behaviour == "wait":
        open(f"{arguments[0]}.begun", "w").close()
        wait_for(arguments[0])
    if behaviour == "hang":
        time.sleep(3600)
    elif behaviour == "die":
        os._exit(1)
    elif behaviour == "babble":
        send(connection, b"not JSON")
    elif behaviour == "refuse":
        send(connection, {"reply": "refused", "reason": "ValueError: no such thing"})
    else:
        fields = [
            {"name": "x", "kind": "batched", "keep_on_cpu": False, "data": tensor(length, shape)}
        ]
        update = {"mode": "replace", "target": [5], "full": [[7, os.getpid()]]}
        send(connection, {"reply": "made", "fields": fields, "updates": [update]})


def child(connection):
    send(connection, {"ready": os.getpid()})
    while True:
        answer(connection, *receive(connection))


def main():
    connection = socket.socket(fileno=0)
    _, _, behaviour = sys.argv[sys.argv.index("--") + 1 :]
    if behaviour == "vanish":
        sys.exit("the last words")
    if behaviour.startswith("log="):
        record_start(behaviour.removeprefix("log="))
    if behaviour == "fail" or os.path.exists(os.path.join(behaviour.removeprefix("log="), "fail")):
        send(connection, {"failed": "NotSupported: takes no media"})
        sys.exit(1)
    unexpected = [name for name in os.environ if name.startswith("CARGO")]
    greeting = {
        "vllm": f"0 {unexpected}",
        "limits": {"image": None, "video": 2},
        "max_tokens": {"image": 9},
    }
    greeting |= {
        "placeholders": {},
        "video_processor": None,
        "own_prompts": [],
        "renderer": "hf",
        "writes_conversations": False,
        "missing": [],
    }
    send(connection, greeting | {"sandbox": False})
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for fork in itertools.count(1):
        _, (child_socket,) = receive(connection)
        if fork == 2 and behaviour == "second-fork-fails":
            os.close(child_socket)
            continue
        if os.fork() == 0:
            connection.close()
            child(socket.socket(fileno=child_socket))
        os.close(child_socket)


main()
