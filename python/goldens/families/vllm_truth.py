"""What vLLM's own multimodal processor makes of an image, on a CPU and without an engine."""

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
# Integer tensors up to this many elements are kept as they are.
SMALL = 16


class Truth:
    """vLLM's processor of one model directory. The model's type is float32: the other types are casts of it."""

    def __init__(self, directory: Path) -> None:
        # Where vLLM would normalise on the device it asks for bytes; asked for by hand here, so that both are recorded.
        self.config = ModelConfig(model=str(directory), dtype="float32", mm_device_do_normalize=False)
        self.processor = MULTIMODAL_REGISTRY.create_processor(self.config)
        self.info = self.processor.info
        self.info.get_hf_processor()
        # Whether vLLM by default takes bytes and normalises them on the device.
        self.device_normalizes = self.config._model_info.supports_mm_device_do_normalize

    def encode(self, text: str) -> list[int]:
        return self.info.get_tokenizer().encode(text, add_special_tokens=False)

    def apply(self, prompt: list[int], images: list[Image.Image], kwargs: dict) -> dict:
        """The processed request; an exception is the one that the model's processor raised."""
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
            raise Refusal(error) from error

    def item(self, image: Image.Image, prompt: str, kwargs: dict, full: bool) -> dict:
        """The placeholder and the tensors of one image, as cases.json has them; `full` adds the other types."""
        prompt = self.encode(prompt)
        result = self.apply(prompt, [image], kwargs)
        dtypes = FULL_DTYPES if full else DTYPES
        elements = result["mm_kwargs"]["image"][0]
        # vLLM collects the names in a set, whose order changes from run to run; here they are as its model lists them.
        names = [name for name in self.processor._get_mm_fields_config(BatchFeature(), {}) if name in elements]
        tensors = {name: described(elements[name], dtypes) for name in names}
        if full:
            for name, hexdigest in self.raw(prompt, image, kwargs).items():
                tensors[name]["uint8"] = hexdigest
        return {"placeholder": runs(result), "tensors": tensors}

    def raw(self, prompt: list[int], image: Image.Image, kwargs: dict) -> dict[str, str]:
        """The same without rescaling and normalising, where the model's processor can do that."""
        try:
            elements = self.apply(prompt, [image], {**kwargs, **RAW})["mm_kwargs"]["image"][0]
        except Refusal:
            return {}
        return {name: digest(element.data) for name, element in elements.items() if element.data.dtype == torch.uint8}


class Refusal(Exception):
    """The processor raised something."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {' '.join(str(error).split())[:80]}".rstrip(": "))


def described(element, dtypes: list[torch.dtype]) -> dict:
    """One tensor of an item; hashes of what it becomes in types that a model can have."""
    data, name = element.data, type(element.field).__name__
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
    elif data.numel() <= SMALL:
        entry["values"] = data.flatten().tolist()
    else:
        entry[entry["dtype"]] = digest(data)
    return entry


def digest(tensor: torch.Tensor) -> str:
    """blake3 of the elements in row-major order."""
    contents = tensor.contiguous()
    if contents.dtype == torch.bfloat16:
        contents = contents.view(torch.int16)
    return blake3.blake3(contents.numpy().tobytes()).hexdigest()


def runs(result: dict) -> list[list]:
    """The placeholder as [token, count, embeds] in runs of equal tokens."""
    (place,) = result["mm_placeholders"]["image"]
    tokens = result["prompt_token_ids"][place.offset : place.offset + place.length]
    return run_lengths(tokens, place.is_embed)


def run_lengths(tokens: list[int], is_embed: torch.Tensor | None) -> list[list]:
    embeds = [True] * len(tokens) if is_embed is None else is_embed.tolist()
    found = []
    for token, embed in zip(tokens, embeds, strict=True):
        if found and found[-1][0] == token and found[-1][2] == embed:
            found[-1][1] += 1
        else:
            found.append([token, 1, embed])
    return found
