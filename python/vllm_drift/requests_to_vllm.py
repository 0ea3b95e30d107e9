"""Decodes a frontend's messages as vLLM's EngineCore does, and compares them with their meaning."""

from dataclasses import asdict, is_dataclass
from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.serial_utils import MsgpackDecoder

# The methods of the plugin, which vLLM does not have.
PLUGIN_METHODS = ("chiasm_attach",)


def problems(kind: str, frames: list[bytearray], meaning: Any) -> list[str]:
    """Returns the differences from the intended meaning; empty if there are none."""
    if kind == "init":
        return _init(bytes(frames[0]), meaning)
    expected = {
        "add": EngineCoreRequestType.ADD,
        "abort": EngineCoreRequestType.ABORT,
        "utility": EngineCoreRequestType.UTILITY,
    }
    found = EngineCoreRequestType(bytes(frames[0]))
    if found != expected[kind]:
        return [f"the message has the type {found}"]
    if kind == "add":
        provider = _Provider()
        request = MsgpackDecoder(EngineCoreRequest, oob_tensor_provider=provider).decode(frames[1:])
        return list(_request(request, meaning, provider))
    decoded = MsgpackDecoder().decode(frames[1:])
    if decoded != meaning:
        return [f"the message is {decoded!r}, not {meaning!r}"]
    if kind == "utility" and decoded[2] not in PLUGIN_METHODS:
        return _call(decoded[2], decoded[3])
    return []


class _Provider:
    """A replacement for the plugin's provider that records the requested tensors."""

    def __init__(self) -> None:
        self.requested: dict[int, tuple[str, list[int], dict]] = {}

    def __call__(self, dtype: str, shape: Any, fields: dict) -> torch.Tensor:
        tensor = torch.empty(tuple(shape), dtype=getattr(torch, dtype))
        self.requested[id(tensor)] = (dtype, list(shape), dict(fields))
        return tensor


class _Socket:
    """The other end of a handshake: answers HELLO with INIT."""

    def __init__(self, init: bytes) -> None:
        self.sent: list[bytes] = []
        self._init = init

    def send(self, message: bytes) -> None:
        self.sent.append(message)

    def poll(self, **_: object) -> bool:
        return bool(self.sent)

    def recv(self) -> bytes:
        return self._init


def hello() -> bytes:
    """Returns the first message of a headless engine. The engine fails later at an invalid INIT."""
    socket = _Socket(b"")
    try:
        EngineCoreProc.startup_handshake(socket, False, True, None)
    except Exception:
        pass
    return socket.sent[0]


def _init(frame: bytes, meaning: dict) -> list[str]:
    addresses = EngineCoreProc.startup_handshake(_Socket(frame), False, True, None)
    return [
        f"{name} is {getattr(addresses, name)!r}"
        for name, expected in meaning.items()
        if getattr(addresses, name) != expected
    ]


def _call(method: str, args: list[Any]) -> list[str]:
    """Returns a problem if the engine lacks the method or can't convert its arguments."""
    function = getattr(EngineCoreProc, method, None)
    if function is None:
        return [f"EngineCoreProc has no {method}"]
    EngineCoreProc._convert_msgspec_args(function.__get__(object()), args)
    return []


def _request(request: EngineCoreRequest, meaning: dict, provider: _Provider):
    unknown = set(meaning) - set(EngineCoreRequest.__struct_fields__)
    if unknown:
        yield f"EngineCoreRequest has no {', '.join(sorted(unknown))}"
    defaults = dict.fromkeys(EngineCoreRequest.__struct_fields__)
    # The fields with defaults are the last ones.
    values = EngineCoreRequest.__struct_defaults__
    defaults.update(zip(EngineCoreRequest.__struct_fields__[-len(values) :], values))
    for name, default in defaults.items():
        found, expected = getattr(request, name), meaning.get(name, default)
        if name == "sampling_params":
            yield from _sampling(found, expected)
        elif name == "lora_request":
            yield from _adapter(found, expected)
        elif name == "mm_features":
            yield from _features(found or [], expected or [], provider)
        elif found != expected:
            yield f"{name} is {found!r}, not {expected!r}"


def _adapter(found: LoRARequest | None, meaning: dict | None):
    if found is None or meaning is None:
        if found is not meaning:
            yield f"lora_request is {found!r}, not {meaning!r}"
        return
    defaults = dict(zip(LoRARequest.__struct_fields__[2:], LoRARequest.__struct_defaults__))
    for name in LoRARequest.__struct_fields__:
        value, expected = getattr(found, name), meaning.get(name, defaults.get(name))
        if value != expected:
            yield f"lora_request.{name} is {value!r}, not {expected!r}"


def _sampling(found: SamplingParams, meaning: dict):
    defaults = SamplingParams()
    for name in set(meaning) - set(SamplingParams.__struct_fields__):
        yield f"SamplingParams has no {name}"
    for name in SamplingParams.__struct_fields__:
        value, expected = getattr(found, name), meaning.get(name, getattr(defaults, name))
        if name == "logit_bias" and expected is not None:
            expected = {int(token): bias for token, bias in expected.items()}
        if name == "structured_outputs" and value is not None:
            output_defaults = asdict(type(value)(json_object=True)) | {"json_object": None}
            value = asdict(value)
            expected = output_defaults | expected
        elif is_dataclass(value):
            value = asdict(value)
        if isinstance(value, set):
            value = sorted(value)
            expected = sorted(expected)
        if value != expected:
            yield f"sampling_params.{name} is {value!r}, not {expected!r}"


def _features(found: list, expected: list[dict], provider: _Provider):
    if len(found) != len(expected):
        yield f"{len(found)} features, not {len(expected)}"
        return
    for number, (feature, meaning) in enumerate(zip(found, expected)):
        path = f"mm_features[{number}]"
        for name in ("modality", "identifier", "mm_hash"):
            if getattr(feature, name) != meaning[name]:
                yield f"{path}.{name} is {getattr(feature, name)!r}"
        position = feature.mm_position
        mask = None if position.is_embed is None else position.is_embed.tolist()
        decoded = {"offset": position.offset, "length": position.length} | (
            {} if mask is None else {"is_embed": mask}
        )
        if decoded != meaning["mm_position"]:
            yield f"{path}.mm_position is {decoded}"
        if feature.data is None or meaning["data"] is None:
            if feature.data is not meaning["data"]:
                yield f"{path}.data is {feature.data!r}"
            continue
        if list(feature.data) != list(meaning["data"]):
            yield f"{path}.data has {list(feature.data)}"
            continue
        for name, element in feature.data.items():
            yield from _element(f"{path}.data[{name}]", element, meaning["data"][name], provider)


def _element(path: str, element: Any, meaning: dict, provider: _Provider):
    kind, attributes = meaning["field"]
    field = element.field
    if type(field).__name__ != kind:
        yield f"{path} is a {type(field).__name__}"
        return
    for name, expected in attributes.items():
        value = getattr(field, name)
        if name == "slices":
            value = [[part.start, part.stop, part.step] for part in value]
        if value != expected:
            yield f"{path}.{name} is {value!r}"
    yield from _data(path, element.data, meaning, provider)


def _data(path: str, data: Any, meaning: dict, provider: _Provider):
    if "list" in meaning:
        if not isinstance(data, list) or len(data) != len(meaning["list"]):
            yield f"{path} is {data!r}"
            return
        for number, (part, expected) in enumerate(zip(data, meaning["list"])):
            yield from _data(f"{path}[{number}]", part, expected, provider)
    elif "number" in meaning:
        if type(data) is not type(meaning["number"]) or data != meaning["number"]:
            yield f"{path} is {data!r}"
    elif "handle" in meaning:
        requested = provider.requested.get(id(data))
        if requested != (meaning["dtype"], meaning["shape"], meaning["handle"]):
            yield f"{path} requests {requested}"
    else:
        length = data.numel() * data.element_size()
        expected = bytes((index * meaning["step"] + 3) % 251 for index in range(length))
        bits = bytes(data.contiguous().view(torch.uint8).flatten().tolist())
        if (str(data.dtype), list(data.shape)) != (
            f"torch.{meaning['dtype']}",
            meaning["shape"],
        ) or bits != expected:
            yield f"{path} is a {data.dtype} of {list(data.shape)} with other values"
