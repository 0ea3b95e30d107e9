"""The processing of recordings, as far as a frontend needs it to predict their tokens.

A frontend reads the length of a recording from the file's header and computes what this package
would report, so that it can route a request before anything is decoded. It needs to know which
loader reads files, and the settings of the feature extractor. Probes let it compare its formula
with the results of this vLLM.
"""

import io
import wave
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import vllm.envs as envs
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.multimodal.media import audio as media_audio

from .processor import Processor
from .updates import to_plain

# The sampling rate of the probe that is resampled.
RESAMPLED_HZ = 44_100
# The samples of the silent file with which a loader is tried.
TRIAL_SAMPLES = 160
# vLLM's limits, by their names here. Older releases lack some of them.
LIMITS = {
    "max_file_mib": "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB",
    "max_seconds": "VLLM_MAX_AUDIO_DECODE_DURATION_S",
    "max_decoded_bytes": "VLLM_MAX_AUDIO_DECODE_BYTES",
}


def describe_audio(processor: Processor) -> dict[str, Any] | None:
    """Returns a description of the processing of recordings; None if it has an unknown form."""
    own = processor.vllm_processor
    try:
        extractor = own.info.get_feature_extractor()
        parser = own.info.get_data_parser()
        description = {
            "processor": type(own).__name__,
            "extractor": {
                "kind": type(extractor).__name__,
                "sampling_rate": _whole(extractor.sampling_rate),
                "hop_length": _whole(extractor.hop_length),
                "max_samples": _whole(extractor.n_samples),
                "features": _whole(extractor.feature_size),
            },
            "resampling": {
                "method": parser.audio_resampler.method,
                "rate": _whole(parser.audio_resampler.target_sr),
            },
            "channels": parser.target_channels,
            "loader": find_loader(processor.audio_io_kwargs()),
            **{name: _limit(name) for name in LIMITS},
        }
        return description | {"probes": list(make_probes(processor, extractor))}
    # The frontend works without a description, so no error may end the server.
    except Exception as error:
        print(f"recordings are not planned: {type(error).__name__}: {error}", flush=True)
        return None


def _limit(name: str) -> float | None:
    """Returns a limit of vLLM; None if there is none."""
    value = getattr(envs, LIMITS[name], None)
    if value is None:
        return None
    if not 0 <= value < 2**63:
        raise ValueError(f"{LIMITS[name]}={value}")
    return value if name == "max_seconds" else _whole(value)


def _whole(number: float) -> int:
    if number != int(number):
        raise ValueError(f"{number} is not an integer")
    return int(number)


def find_loader(io_kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the loader of files and the versions of its libraries; None if it is not known.

    The order is that of vLLM's ``load_audio``.
    """
    if set(io_kwargs) - {"audio_backend"}:
        return None
    backend = io_kwargs.get("audio_backend") or "auto"
    if backend in ("auto", "torchcodec") and _has_torchcodec():
        import torchcodec

        return {"name": "torchcodec", "ffmpeg": getattr(torchcodec, "ffmpeg_major_version", None)}
    if backend in ("auto", "soundfile") and find_spec("soundfile") is not None:
        import soundfile

        return {
            "name": "sndfile",
            "sndfile": soundfile.__libsndfile_version__,
            "avformat": _pyav_version() if backend == "auto" else None,
        }
    return None


def _has_torchcodec() -> bool:
    """Returns True if torchcodec reads files. It is tried, because it loads FFmpeg only then."""
    load = getattr(media_audio, "load_audio_torchcodec", None)
    if load is None:
        return False
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(RESAMPLED_HZ)
        writer.writeframes(bytes(2 * TRIAL_SAMPLES))
    try:
        samples, _ = load(io.BytesIO(file.getvalue()), sr=None)
    except ImportError:
        return False
    return len(samples) == TRIAL_SAMPLES


def _pyav_version() -> int | None:
    if find_spec("av") is None:
        return None
    import av

    return av.library_versions["libavformat"][0]


def make_probes(processor: Processor, extractor: Any) -> Iterator[dict[str, Any]]:
    """Yields the results for silent recordings of some lengths.

    They are shorter than the extractor's maximum, longer, and resampled.
    """
    rate = extractor.sampling_rate
    longest = extractor.n_samples
    for samples, rate in (
        (rate + 1, rate),
        (longest, rate),
        (longest + extractor.hop_length + 1, rate),
        (2 * RESAMPLED_HZ + 1, RESAMPLED_HZ),
    ):
        silence = (np.zeros(samples, dtype=np.float32), rate)
        item, updates = processor.process_loaded({"audio": [silence]}, "audio", {})
        yield {
            "samples": samples,
            "rate": rate,
            "elements": _max_elements(item),
            "updates": [to_plain(update) for update in updates],
        }


def _max_elements(item: MultiModalKwargsItem) -> int:
    """Returns the number of elements of the largest tensor."""
    values = (element.data for element in item.values())
    return max((value.numel() for value in values if isinstance(value, torch.Tensor)), default=0)
