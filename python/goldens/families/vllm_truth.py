"""The output of vLLM's own multimodal processor for an image, on a CPU and without an engine."""

import os

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from pathlib import Path

import blake3
import torch
from PIL import Image
from transformers import BatchFeature
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import ProcessorInputs
from vllm.multimodal.processing.context import TimingContext

RAW = {"do_rescale": False, "do_normalize": False}
DTYPES = [torch.float32]
FULL_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The largest number of elements of an integer tensor whose values are recorded in place of a hash.
MAX_LISTED_ELEMENTS = 16


class VllmProcessor:
    """vLLM's processor of one model directory.

    The model's type is float32; the other types are casts of its tensors.
    """

    def __init__(self, directory: Path, engine_kwargs: dict | None = None) -> None:
        """Loads the processor; `engine_kwargs` are `--mm-processor-kwargs`."""
        # If vLLM normalizes on the device, its processor yields bytes. Switched off here, because
        # `raw_digests` records the bytes separately.
        self.config = ModelConfig(
            model=str(directory),
            dtype="float32",
            mm_device_do_normalize=False,
            mm_processor_kwargs=engine_kwargs,
        )
        self.processor = MULTIMODAL_REGISTRY.create_processor(self.config)
        self.info = self.processor.info
        self.info.get_hf_processor()
        # True if vLLM by default takes bytes and normalizes them on the device.
        self.device_normalizes = self.config._model_info.supports_mm_device_do_normalize

    def encode(self, text: str) -> list[int]:
        return self.info.get_tokenizer().encode(text, add_special_tokens=False)

    def apply(self, prompt: list[int], images: list[Image.Image], kwargs: dict) -> dict:
        """Returns the processed request; raises the root cause of a failure as `ProcessorError`."""
        try:
            inputs = ProcessorInputs(
                prompt=prompt,
                mm_data_items=self.info.parse_mm_data({"image": images}),
                hf_processor_mm_kwargs=kwargs,
            )
            return self.processor.apply(inputs, TimingContext(enabled=False))
        except Exception as error:
            while isinstance(error, ValueError) and error.__cause__ is not None:
                error = error.__cause__
            raise ProcessorError(error) from error

    def describe_item(self, image: Image.Image, prompt: str, kwargs: dict, full: bool) -> dict:
        """Returns the placeholder and the tensors of one image in the form of cases.json.

        `full` adds the hashes of the other types.
        """
        prompt = self.encode(prompt)
        result = self.apply(prompt, [image], kwargs)
        dtypes = FULL_DTYPES if full else DTYPES
        elements = result["mm_kwargs"]["image"][0]
        # vLLM collects the names in a set, whose order changes from run to run. The order of the
        # model's fields does not.
        names = [
            name
            for name in self.processor._get_mm_fields_config(BatchFeature(), {})
            if name in elements
        ]
        tensors = {name: describe_tensor(elements[name], dtypes) for name in names}
        if full:
            for name, hexdigest in self.raw_digests(prompt, image, kwargs).items():
                tensors[name]["uint8"] = hexdigest
        return {"placeholder": placeholder_runs(result), "tensors": tensors}

    def raw_digests(self, prompt: list[int], image: Image.Image, kwargs: dict) -> dict[str, str]:
        """Returns the hashes of the tensors without rescaling and normalization.

        Empty if the model's processor fails with these switched off.
        """
        try:
            elements = self.apply(prompt, [image], {**kwargs, **RAW})["mm_kwargs"]["image"][0]
        except ProcessorError:
            return {}
        return {
            name: digest(element.data)
            for name, element in elements.items()
            if element.data.dtype == torch.uint8
        }


class ProcessorError(Exception):
    """An exception from vLLM's processor: its type and the first 80 characters of its text."""

    def __init__(self, error: Exception) -> None:
        super().__init__(
            f"{type(error).__name__}: {' '.join(str(error).split())[:80]}".rstrip(": ")
        )


def describe_tensor(element, dtypes: list[torch.dtype]) -> dict:
    """Describes one tensor of an item, with its hashes after casts to `dtypes`."""
    data = element.data
    name = type(element.field).__name__
    field = name.removeprefix("MultiModal").removesuffix("Field").lower()
    entry = {
        "dtype": str(data.dtype).removeprefix("torch."),
        "shape": list(data.shape),
        "field": field,
        "keep_on_cpu": element.field.keep_on_cpu,
    }
    if data.is_floating_point():
        assert data.dtype == torch.float32
        for dtype in dtypes:
            entry[str(dtype).removeprefix("torch.")] = digest(data.to(dtype))
    elif data.numel() <= MAX_LISTED_ELEMENTS:
        entry["values"] = data.flatten().tolist()
    else:
        entry[entry["dtype"]] = digest(data)
    return entry


def digest(tensor: torch.Tensor) -> str:
    """Returns the blake3 hash of the elements in row-major order."""
    contents = tensor.contiguous()
    if contents.dtype == torch.bfloat16:
        contents = contents.view(torch.int16)
    return blake3.blake3(contents.numpy().tobytes()).hexdigest()


def placeholder_runs(result: dict) -> list[list]:
    """Returns the placeholder as runs of equal tokens: [token, count, embeds]."""
    (place,) = result["mm_placeholders"]["image"]
    tokens = result["prompt_token_ids"][place.offset : place.offset + place.length]
    return run_lengths(tokens, place.is_embed)


def run_lengths(tokens: list[int], is_embed: torch.Tensor | None) -> list[list]:
    """Returns runs [token, count, embeds]; without a mask every token embeds."""
    embeds = [True] * len(tokens) if is_embed is None else is_embed.tolist()
    runs = []
    for token, embed in zip(tokens, embeds, strict=True):
        if runs and runs[-1][0] == token and runs[-1][2] == embed:
            runs[-1][1] += 1
        else:
            runs.append([token, 1, embed])
    return runs
