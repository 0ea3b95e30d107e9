"""A Dynamo worker without an engine that checks received images.

    python tensors_worker.py SITE_PACKAGES MODEL_DIR DTYPE ENDPOINT REPORT

It receives the images of each request like Dynamo's own worker for vLLM, compares them with the
output of vLLM's own processor for the same files, and reports differences. Runs in vLLM's Python;
SITE_PACKAGES is the folder of Dynamo's packages. REPORT gets a line of JSON for each request.
"""

import asyncio
import base64
import io
import json
import os
import sys

SITE, MODEL, DTYPE, ENDPOINT, REPORT = sys.argv[1:]
# Appended, so that vLLM's packages take precedence.
sys.path.append(SITE)
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime
from dynamo.vllm.multimodal_utils.request_processor import VllmMultimodalRequestProcessor
from PIL import Image
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import ProcessorInputs
from vllm.multimodal.processing.context import TimingContext

PROCESSOR = MULTIMODAL_REGISTRY.create_processor(ModelConfig(model=MODEL, dtype=DTYPE))
# The media loader is not used: only received tensors count.
RECEIVER = VllmMultimodalRequestProcessor(
    model=MODEL,
    enable_multimodal=True,
    image_loader=object(),
    video_loader=object(),
    audio_loader=object(),
)


def process_with_vllm(request: dict) -> dict:
    """Returns vLLM's output for the files and the prompt with one marker each."""
    urls = [item["Url"] for item in request["multi_modal_data"]["image_url"]]
    files = [base64.b64decode(url.partition(";base64,")[2]) for url in urls]
    images = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
    inputs = ProcessorInputs(
        prompt=request["token_ids"],
        mm_data_items=PROCESSOR.info.parse_mm_data({"image": images}),
        hf_processor_mm_kwargs={},
    )
    return PROCESSOR.apply(inputs, TimingContext(enabled=False))


def differences(received: dict, expected: dict) -> list[str]:
    """Returns the names of the parts that differ."""
    found = []
    if list(received["prompt_token_ids"]) != list(expected["prompt_token_ids"]):
        found.append("prompt_token_ids")
    for index, (actual, wanted) in enumerate(
        zip(received["mm_placeholders"]["image"], expected["mm_placeholders"]["image"])
    ):
        if (actual.offset, actual.length, actual.get_num_embeds()) != (
            wanted.offset,
            wanted.length,
            wanted.get_num_embeds(),
        ):
            found.append(f"placeholder {index}")
    items = (received["mm_kwargs"]["image"], expected["mm_kwargs"]["image"])
    if len(items[0]) != len(items[1]):
        found.append("number of items")
    for index, (actual, wanted) in enumerate(zip(*items)):
        if set(actual) != set(wanted):
            found.append(f"names of item {index}: {sorted(actual)} and {sorted(wanted)}")
            continue
        for name in wanted:
            element = actual[name]
            reference = wanted[name]
            data = reference.data
            # vLLM casts floats to the model's dtype before passing them on.
            if data.is_floating_point():
                data = data.to(getattr(torch, DTYPE))
            if element.data.dtype != data.dtype or not torch.equal(element.data, data):
                shape = tuple(element.data.shape)
                found.append(f"{name} of item {index}: {element.data.dtype}, {shape}")
            if (
                type(element.field) is not type(reference.field)
                or element.field.keep_on_cpu != reference.field.keep_on_cpu
            ):
                found.append(f"field of {name} of item {index}")
    return found


async def answer(request: dict, context=None):
    received = await RECEIVER.try_receive_mm_kwargs(request)
    report = {"received": received is not None}
    if received is not None:
        expected = process_with_vllm(request)
        report["items"] = len(received["mm_kwargs"]["image"])
        report["elements"] = sum(
            field.data.numel() for item in received["mm_kwargs"]["image"] for field in item.values()
        )
        report["dtypes"] = sorted(
            {str(f.data.dtype) for item in received["mm_kwargs"]["image"] for f in item.values()}
        )
        report["hashes"] = received["mm_hashes"]["image"]
        report["differences"] = differences(received, expected)
    prompt = (
        len(received["prompt_token_ids"]) if received is not None else len(request["token_ids"])
    )
    with open(REPORT, "a") as file:
        file.write(json.dumps(report) + "\n")
    usage = {"prompt_tokens": prompt, "completion_tokens": 1, "total_tokens": prompt + 1}
    yield {"token_ids": [5], "finish_reason": "length", "completion_usage": usage}


async def serve() -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), "etcd", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint(ENDPOINT)
    config = ModelRuntimeConfig()
    config.total_kv_blocks = 1000
    config.max_num_seqs = 8
    config.max_num_batched_tokens = 8192
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        endpoint,
        MODEL,
        model_name="mocked",
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=16,
        runtime_config=config,
    )
    await endpoint.serve_endpoint(answer)


asyncio.run(serve())
