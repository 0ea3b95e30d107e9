#!/usr/bin/env python3
"""A fork server without vLLM, for tests of videos.

The flag after the model selects its behaviour. With `frames`, the bytes of a frame are its position
in the file. With `whole=TOKENS`, files have other frames than announced, and an item has that many
tokens. With `once=TOKENS`, only the first process does so.
"""

import json
import os
import signal
import socket
import struct
import sys

VIDEO_TOKEN = 447


def send(connection, message):
    content = json.dumps(message).encode()
    connection.sendall(struct.pack("<I", len(content)) + content)


def receive(connection):
    header, files, _, _ = socket.recv_fds(connection, 4, 1)
    if len(header) < 4:
        sys.exit(0)
    content = b""
    (length,) = struct.unpack("<I", header)
    while len(content) < length:
        content += connection.recv(length - len(content))
    return json.loads(content), files


def send_frames(connection, call, memory):
    length, slots = call["length"], call["slots"]
    frame_bytes = call["width"] * call["height"] * 3
    for number, position in enumerate(call["positions"]):
        if number >= slots:
            assert receive(connection) == ({"call": "taken"}, [])
        offset = length + number % slots * frame_bytes
        os.pwrite(memory, bytes([position]) * frame_bytes, offset)
        send(connection, {"reply": "frame", "position": position, "offset": offset})
    send(connection, {"reply": "decoded"})


def answer(connection, behaviour, call, memory, is_first):
    kind, _, tokens = behaviour.partition("=")
    if call["call"] == "frames":
        if kind == "whole" or (kind == "once" and is_first):
            return send(connection, {"reply": "different", "reason": "one frame"})
        return send_frames(connection, call, memory)
    offset = call["length"]
    os.pwrite(memory, b"\1\2\3\4", offset)
    tensor = {"dtype": "uint8", "shape": [4], "offset": offset, "length": 4}
    fields = [{"name": "x", "kind": "batched", "keep_on_cpu": False, "data": tensor}]
    update = {"mode": "replace", "target": [VIDEO_TOKEN], "full": [[VIDEO_TOKEN, int(tokens)]]}
    send(connection, {"reply": "made", "fields": fields, "updates": [update]})


def child(connection, behaviour, is_first):
    send(connection, {"ready": os.getpid()})
    while True:
        call, (memory,) = receive(connection)
        answer(connection, behaviour, call, memory, is_first)
        is_first = is_first and call["call"] != "frames"
        os.close(memory)


def main():
    connection = socket.socket(fileno=0)
    behaviour = sys.argv[-1]
    send(
        connection,
        {
            "vllm": "0.33.0",
            "limits": {"image": None, "video": None},
            "max_tokens": {"image": 9},
            "placeholders": {"video": ["<|vision_start|><|video_pad|><|vision_end|>"]},
            "video_processor": None,
            "own_prompts": [],
            "renderer": "hf",
            "writes_conversations": False,
            "missing": [],
            "sandbox": False,
        },
    )
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    is_first = True
    while True:
        _, (child_socket,) = receive(connection)
        if os.fork() == 0:
            connection.close()
            child(socket.socket(fileno=child_socket), behaviour, is_first)
        is_first = False
        os.close(child_socket)


main()
