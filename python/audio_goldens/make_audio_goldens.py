#!/usr/bin/env python3
"""Writes the golden values of chiasm-audio: what vLLM makes of each recording.

    python make_audio_goldens.py [--torchcodec] MODEL_FOLDER...

Needs vLLM with soundfile and PyAV, and the folders of tiny models with recordings. Reads
crates/chiasm-audio/tests/recordings, which `make_recordings.py` makes, and the recipes of
`wav.py`. Writes `index.json` there: by recording the sample rate and the number of samples of
vLLM's loader, and by model the tokens and the elements of the largest tensor; `null` where vLLM
refuses.

With `--torchcodec`, which needs FFmpeg's shared libraries, it writes only `torchcodec.json`: the
rates and lengths of that loader.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python/chiasm_processor"))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import msgspec  # noqa: E402
import qwen3_omni  # noqa: E402
import torch  # noqa: E402
import wav  # noqa: E402
from chiasm_processor.audio import describe_audio, find_loader  # noqa: E402
from chiasm_processor.processor import Processor  # noqa: E402
from vllm.multimodal.media.audio import AudioMediaIO  # noqa: E402

RECORDINGS = ROOT / "crates/chiasm-audio/tests/recordings"
SUFFIXES = {".flac", ".mp3", ".m4a", ".mov"}


def recordings() -> dict[str, bytes]:
    files = sorted(path for path in RECORDINGS.iterdir() if path.suffix in SUFFIXES)
    made = {name: wav.build(recipe) for name, recipe in wav.RECIPES.items()}
    return {path.name: path.read_bytes() for path in files} | made


def loaded(data: bytes, backend: str | None) -> dict[str, int] | None:
    """Returns the rate and length of a recording; None if vLLM refuses it."""
    try:
        samples, rate = AudioMediaIO(audio_backend=backend).load_bytes(data)
    except Exception:
        return None
    return {"rate": int(rate), "samples": samples.shape[-1]}


def processed(processor: Processor, data: bytes) -> dict[str, int] | None:
    """Returns the size of a recording in a model; None if vLLM refuses it."""
    try:
        item, (update,) = processor.make_item("audio", data, {}, {})
    except Exception:
        return None
    values = (element.data for element in item.values())
    elements = max(value.numel() for value in values if isinstance(value, torch.Tensor))
    return {"tokens": len(update.content.full), "elements": elements}


def write(name: str, content: Any) -> None:
    text = json.dumps(content, indent=1, sort_keys=True)
    (RECORDINGS / name).write_text(text + "\n")


def main() -> None:
    arguments = sys.argv[1:]
    torch.set_num_threads(1)
    if arguments == ["--torchcodec"]:
        loader = find_loader({"audio_backend": "torchcodec"})
        lengths = {name: loaded(data, "torchcodec") for name, data in recordings().items()}
        return write("torchcodec.json", {"loader": loader, "lengths": lengths})
    loader = find_loader({})
    if not arguments or loader is None or loader["name"] != "sndfile":
        sys.exit(__doc__)
    processors = {Path(folder).name: Processor(["--model", folder]) for folder in arguments}
    with tempfile.TemporaryDirectory() as folder:
        qwen3_omni.make(Path(folder))
        processors["qwen3omni"] = Processor(["--model", folder])
        write_index(loader, processors)


def write_index(loader: dict[str, Any], processors: dict[str, Processor]) -> None:
    models = {name: describe_audio(processor) for name, processor in processors.items()}
    entries = {}
    for name, data in recordings().items():
        sizes = {model: processed(processor, data) for model, processor in processors.items()}
        entries[name] = {"wav": wav.RECIPES.get(name), "length": loaded(data, None), **sizes}
    index = {"loader": loader, "models": models, "recordings": entries}
    write("index.json", msgspec.to_builtins(index))


if __name__ == "__main__":
    main()
