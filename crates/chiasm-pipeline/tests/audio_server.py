#!/usr/bin/env python3
"""A fork server without vLLM, for tests of recordings.

The flag after the model selects its behaviour: `tokens=N` makes items of that many tokens,
`refuse` makes none, and `other_probes` greets with results that no formula gives.
"""

import json
import os
import signal
import socket
import struct
import sys

AUDIO_TOKEN = 447
RATE, HOP, MAX_SAMPLES, FEATURES = 16_000, 160, 480_000, 128


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


def update(tokens):
    return {"mode": "replace", "target": [AUDIO_TOKEN], "full": [[AUDIO_TOKEN, tokens]]}


def probe(samples, other):
    frames = -(-min(samples, MAX_SAMPLES) // HOP)
    tokens = ((frames - 1) // 2 - 1) // 2 + 1
    elements = MAX_SAMPLES // HOP * FEATURES
    updates = [update(tokens + other)]
    return {"samples": samples, "rate": RATE, "elements": elements, "updates": updates}


def description(behaviour):
    other = int(behaviour == "other_probes")
    return {
        "processor": "Qwen2AudioMultiModalProcessor",
        "extractor": {
            "kind": "WhisperFeatureExtractor",
            "sampling_rate": RATE,
            "hop_length": HOP,
            "max_samples": MAX_SAMPLES,
            "features": FEATURES,
        },
        "resampling": {"method": "torchaudio", "rate": RATE},
        "channels": 1,
        "loader": {"name": "sndfile", "sndfile": "1.2.2", "avformat": 62},
        "max_file_mib": 1,
        "max_seconds": 60,
        "max_decoded_bytes": 1 << 22,
        "probes": [probe(16_001, 0), probe(480_161, other)],
    }


def answer(connection, behaviour, call, memory):
    if behaviour == "refuse":
        return send(connection, {"reply": "refused", "reason": "not a recording"})
    offset = call["length"]
    os.pwrite(memory, b"\1\2\3\4", offset)
    tensor = {"dtype": "uint8", "shape": [4], "offset": offset, "length": 4}
    fields = [{"name": "x", "kind": "batched", "keep_on_cpu": False, "data": tensor}]
    tokens = int(behaviour.removeprefix("tokens="))
    send(connection, {"reply": "made", "fields": fields, "updates": [update(tokens)]})


def child(connection, behaviour):
    send(connection, {"ready": os.getpid()})
    while True:
        call, (memory,) = receive(connection)
        answer(connection, behaviour, call, memory)
        os.close(memory)


def main():
    connection = socket.socket(fileno=0)
    behaviour = sys.argv[-1]
    send(
        connection,
        {
            "vllm": "0.33.0",
            "limits": {"audio": None},
            "max_tokens": {"audio": 750},
            "placeholders": {"audio": ["<|vision_start|><|video_pad|><|vision_end|>"]},
            "video_processor": None,
            "audio": description(behaviour),
            "own_prompts": [],
            "renderer": "hf",
            "writes_conversations": False,
            "missing": [],
            "sandbox": False,
        },
    )
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        _, (child_socket,) = receive(connection)
        if os.fork() == 0:
            connection.close()
            child(socket.socket(fileno=child_socket), behaviour)
        os.close(child_socket)


main()
