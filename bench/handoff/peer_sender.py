"""The process that sends images in the peers' ways. It takes orders over pipes, one JSON object per
line.

    peer_sender.py ENGINE_INPUT SEGMENTS

    in   {"way": "aux", "pickle" or "msgpack", "id": text, "height": patches, "width": patches,
          "seed": number}
    in   {"way": "hash", "bytes": number}
    out  {"start": ns, "end": ns or null, "checksum": number or null}

`aux` sends the item with vLLM's encoder to the engine's input socket at ENGINE_INPUT, which this
process binds; the engine reports the end. The other ways send the item through a segment of shared
memory to a fork of this process, with messages at SEGMENTS. `hash` hashes an image whose file has
this number of bytes. Items are made at their first use,
outside of the measured time, and kept. The first line out has the versions; it is sent when the
engine has connected.
"""

import os
import platform
import sys
import time
from functools import lru_cache

import msgspec
import torch
import vllm
import zmq
from PIL import Image
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.media import MediaWithBytes
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.serial_utils import MsgpackEncoder

import images
import segments
from parent import fork, orders, run, send
from segment_receiver import receive

ENGINE = (0).to_bytes(2, "little")
# Importing vLLM takes the engine half a minute of CPU time.
START_TIMEOUT_MS = 300_000
TIMEOUT_MS = 20_000
# As in our own requests.
IMAGE_TOKENS = 16
IMAGE_TOKEN = 151655
# Part of what vLLM hashes.
MODEL_ID = "Qwen/Qwen2-VL-2B-Instruct"


@lru_cache(maxsize=None)
def item(height, width, seed):
    return images.item(height, width, seed)


def bind(context, kind, address):
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
    socket.setsockopt(zmq.SNDTIMEO, TIMEOUT_MS)
    socket.bind(address)
    return socket


def request(order, data):
    feature = MultiModalFeatureSpec(
        data=data,
        modality="image",
        identifier=order["id"],
        mm_position=PlaceholderRange(offset=1, length=IMAGE_TOKENS),
        mm_hash=order["id"],
    )
    return EngineCoreRequest(
        request_id=order["id"],
        prompt_token_ids=[1] + [IMAGE_TOKEN] * IMAGE_TOKENS + [2],
        mm_features=[feature],
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def send_aux_frames(engine, encoder, order, data):
    add = request(order, data)
    start = time.monotonic_ns()
    frames = (ENGINE, EngineCoreRequestType.ADD.value, *encoder.encode(add))
    engine.send_multipart(frames, copy=False)
    return {"start": start, "end": None, "checksum": None}


def send_segment(receiver, order, data):
    start = time.monotonic_ns()
    segment, size = segments.write(order["way"], data)
    try:
        receiver.send(msgspec.msgpack.encode([order["way"], segment.name, size]))
        end, checksum = msgspec.msgpack.decode(receiver.recv())
    except zmq.Again:
        raise TimeoutError("the receiver of segments does not answer") from None
    finally:
        segments.remove(segment)
    return {"start": start, "end": end, "checksum": checksum}


@lru_cache(maxsize=None)
def loaded_image(size):
    """Returns an image as vLLM's frontend has it after loading: with the bytes of its file."""
    return MediaWithBytes(Image.new("RGB", (8, 8)), os.urandom(size))


def hash_file(order):
    image = loaded_image(order["bytes"])
    start = time.monotonic_ns()
    MultiModalHasher.hash_kwargs("blake3", model_id=MODEL_ID, image=image)
    return {"start": start, "end": time.monotonic_ns(), "checksum": None}


def serve(engine, receiver):
    # The first message says that the engine is ready.
    if not engine.poll(START_TIMEOUT_MS):
        raise TimeoutError("the engine has not connected")
    engine.recv_multipart()
    python = platform.python_version()
    send({"vllm": vllm.__version__, "pyzmq": zmq.__version__, "python": python})
    encoder = MsgpackEncoder()
    for order in orders():
        if order["way"] == "hash":
            send(hash_file(order))
            continue
        data = item(order["height"], order["width"], order["seed"])
        if order["way"] == "aux":
            send(send_aux_frames(engine, encoder, order, data))
        else:
            send(send_segment(receiver, order, data))


def main(engine_input, segments_address):
    # Before there are threads. A fork saves half a minute of imports.
    fork(lambda: receive(segments_address))
    torch.set_num_threads(1)
    context = zmq.Context()
    engine = bind(context, zmq.ROUTER, engine_input)
    serve(engine, bind(context, zmq.PAIR, segments_address))


if __name__ == "__main__":
    run(main, *sys.argv[1:])
