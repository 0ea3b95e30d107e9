"""Writes the goldens of chiasm-vision's image families: the items that vLLM sends to its engine.

    python make_family_goldens.py [FAMILY...] [--out crates/chiasm-vision/tests/goldens/families]

Runs on a CPU in an environment with vLLM and starts no engine. Writes for each family:

- the model directories
- `cases.json`: the placeholder and the tensors of one image per case; large tensors as hashes
- `plans.json`: many sizes without pixels
- `prompts.json`, for families whose prompts are not expanded by replacing a single token
"""

import argparse
import importlib
import json
import platform
import shutil
import tempfile
import warnings
from pathlib import Path

from families import toy_tokenizer
from families.vllm_truth import (
    ProcessorError,
    VllmProcessor,
    run_lengths,
)  # first: sets vLLM's environment

import PIL
import torch
import torchvision
import transformers
import vllm
from PIL import Image

import fixture_images

FAMILIES = [
    "llava",
    "llava_next",
    "gemma3",
    "llama4",
    "pixtral",
    "mistral3",
    "internvl",
    "internvl_chat",
    "qwen_more",
]
KINDS = ["mix", "noise", "checker", "gradient"]
# The separators of JSON without spaces.
COMPACT = (",", ":")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}")
    default = Path(__file__).parents[2] / "crates/chiasm-vision/tests/goldens/families"
    parser.add_argument("--out", type=Path, default=default)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    # The output does not depend on the number of threads.
    torch.set_num_threads(2)
    for name in arguments.families or FAMILIES:
        family = importlib.import_module(f"families.{name}").FAMILY
        write_family(family, arguments.out / name)


def write_family(family, out: Path) -> None:
    """Replaces the goldens of one family in the directory `out`."""
    shutil.rmtree(out, ignore_errors=True)
    models = {}
    cases = []
    processors = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, model in family.models.items():
            write_files(out / "models" / name, model.files)
            work = Path(scratch) / name
            write_files(work, model.files)
            settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | model.tokenizer_settings
            toy_tokenizer.write(work, model.vocabulary, model.plain_tokens, model.merges, settings)
            models[name] = {"vocabulary": model.vocabulary}
            try:
                processor = VllmProcessor(work)
            except Exception as error:
                models[name] |= {"texts": {}, "error": type(error).__name__}
                continue
            processors[name] = processor
            models[name] |= {
                "texts": {text: processor.encode(text) for text in model.texts},
                "error": None,
            }
            models[name]["device_normalizes"] = processor.device_normalizes
            for size, kwargs in model.trials:
                row = case(name, processor, family.prompt, size, kwargs, len(cases), model.full)
                if "tensors" in row and not family.engine_accepts(
                    model.files["config.json"], size, row
                ):
                    row["engine_refuses"] = True
                cases.append(row)
        prompts = [prompt(processors[name], name, *rest) for name, *rest in family.prompts]
    head = {"versions": versions(), "models": models}
    write_lines(out / "cases.json", head, "cases", cases)
    counts = f"{len(models)} models, {len(cases)} cases"
    if family.plans is not None:
        columns, rows = family.plans()
        write_lines(out / "plans.json", {"versions": versions(), "columns": columns}, "plans", rows)
        counts += f", {len(rows)} plans"
    if prompts:
        write_lines(out / "prompts.json", {"versions": versions()}, "prompts", prompts)
        counts += f", {len(prompts)} prompts"
    print(f"{out.name}: {counts}", flush=True)


def case(
    model: str,
    processor: VllmProcessor,
    prompt: str,
    size: tuple[int, int],
    kwargs: dict,
    seed: int,
    full: bool,
) -> dict:
    """Returns the case of one image of one model."""
    width, height = size
    image = {"kind": KINDS[seed % len(KINDS)], "width": width, "height": height, "seed": seed}
    case = {"model": model, "image": image} | ({"kwargs": kwargs} if kwargs else {})
    pixels = Image.fromarray(fixture_images.pixels(image["kind"], width, height, seed))
    try:
        return case | processor.describe_item(pixels, prompt, kwargs, full)
    except ProcessorError as error:
        return case | {"error": str(error)}


def prompt(
    processor: VllmProcessor, model: str, text: str, sizes: list[tuple[int, int]], kwargs: dict
) -> dict:
    """Returns a prompt with several images, before and after expansion."""
    tokens = processor.encode(text)
    images = [Image.new("RGB", size) for size in sizes]
    row = {
        "model": model,
        "text": text,
        "tokens": tokens,
        "images": [list(size) for size in sizes],
        "kwargs": kwargs,
    }
    try:
        result = processor.apply(tokens, images, kwargs)
    except ProcessorError as error:
        return row | {"error": str(error)}
    places = []
    for place in result["mm_placeholders"]["image"]:
        embeds = [
            [count, embeds] for _, count, embeds in run_lengths([0] * place.length, place.is_embed)
        ]
        places.append({"offset": place.offset, "length": place.length, "embeds": embeds})
    expanded = [run[:2] for run in run_lengths(result["prompt_token_ids"], None)]
    return row | {"expanded": expanded, "placeholders": places}


def write_files(directory: Path, files: dict[str, dict]) -> None:
    directory.mkdir(parents=True)
    for name, contents in files.items():
        (directory / name).write_text(json.dumps(contents, indent=1) + "\n")


def versions() -> dict:
    return {
        "python": platform.python_version(),
        "vllm": vllm.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "pillow": PIL.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def write_lines(
    path: Path, head: dict, key: str, rows: list, separators: tuple[str, str] | None = None
) -> None:
    """Writes JSON with one row per line, for readable diffs."""
    lines = ",\n".join(json.dumps(row, separators=separators) for row in rows)
    fields = "".join(
        f"{json.dumps(name)}: {entry_per_line(value)},\n" for name, value in head.items()
    )
    path.write_text(f"{{\n{fields}{json.dumps(key)}: [\n{lines}\n]\n}}\n")


def entry_per_line(value: object) -> str:
    """Returns JSON with one line per entry of a dictionary."""
    if not isinstance(value, dict):
        return json.dumps(value)
    return (
        "{\n"
        + ",\n".join(f" {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items())
        + "\n}"
    )


if __name__ == "__main__":
    main()
