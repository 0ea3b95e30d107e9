"""Reads a frontend's messages as vLLM's EngineCore does, and compares them with what they mean."""

from dataclasses import asdict, is_dataclass
from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.serial_utils import MsgpackDecoder

# Methods that are not vLLM's own.
OF_THE_PLUGIN = ("chiasm_attach",)


def problems(kind: str, frames: list[bytearray], means: Any) -> list[str]:
    """What is not as it was meant; nothing if all is."""
    if kind == "init":
        return _init(bytes(frames[0]), means)
    wanted = {"add": EngineCoreRequestType.ADD, "abort": EngineCoreRequestType.ABORT, "utility": EngineCoreRequestType.UTILITY}
    found = EngineCoreRequestType(bytes(frames[0]))
    if found != wanted[kind]:
        return [f"it is of type {found}"]
    if kind == "add":
        provider = _Provider()
        request = MsgpackDecoder(EngineCoreRequest, oob_tensor_provider=provider).decode(frames[1:])
        return list(_request(request, means, provider))
    decoded = MsgpackDecoder().decode(frames[1:])
    if decoded != means:
        return [f"it is {decoded!r}, not {means!r}"]
    if kind == "utility" and decoded[2] not in OF_THE_PLUGIN:
        return _call(decoded[2], decoded[3])
    return []


class _Provider:
    """Stands in for the plugin's: notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: dict[int, tuple[str, list[int], dict]] = {}

    def __call__(self, dtype: str, shape: Any, fields: dict) -> torch.Tensor:
        tensor = torch.empty(tuple(shape), dtype=getattr(torch, dtype))
        self.asked[id(tensor)] = (dtype, list(shape), dict(fields))
        return tensor


class _Socket:
    """A handshake's other end: gives INIT to whoever has said HELLO."""

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
    """The first message of a headless engine. It fails later on, at an INIT that is none."""
    socket = _Socket(b"")
    try:
        EngineCoreProc.startup_handshake(socket, False, True, None)
    except Exception:
        pass
    return socket.sent[0]


def _init(frame: bytes, means: dict) -> list[str]:
    addresses = EngineCoreProc.startup_handshake(_Socket(frame), False, True, None)
    return [f"{name} is {getattr(addresses, name)!r}" for name, wanted in means.items() if getattr(addresses, name) != wanted]


def _call(method: str, args: list[Any]) -> list[str]:
    """Whether the engine has the method and takes so many arguments."""
    function = getattr(EngineCoreProc, method, None)
    if function is None:
        return [f"EngineCoreProc has no {method}"]
    EngineCoreProc._convert_msgspec_args(function.__get__(object()), args)
    return []


def _request(request: EngineCoreRequest, means: dict, provider: _Provider):
    unknown = set(means) - set(EngineCoreRequest.__struct_fields__)
    if unknown:
        yield f"there is no {', '.join(sorted(unknown))}"
    defaults = dict.fromkeys(EngineCoreRequest.__struct_fields__)
    # Those with a default are the last ones.
    given = EngineCoreRequest.__struct_defaults__
    defaults.update(zip(EngineCoreRequest.__struct_fields__[-len(given) :], given))
    for name, default in defaults.items():
        found, wanted = getattr(request, name), means.get(name, default)
        if name == "sampling_params":
            yield from _sampling(found, wanted)
        elif name == "lora_request":
            yield from _adapter(found, wanted)
        elif name == "mm_features":
            yield from _features(found or [], wanted or [], provider)
        elif found != wanted:
            yield f"{name} is {found!r}, not {wanted!r}"


def _adapter(found: LoRARequest | None, means: dict | None):
    if found is None or means is None:
        if found is not means:
            yield f"lora_request is {found!r}, not {means!r}"
        return
    defaults = dict(zip(LoRARequest.__struct_fields__[2:], LoRARequest.__struct_defaults__))
    for name in LoRARequest.__struct_fields__:
        value, wanted = getattr(found, name), means.get(name, defaults.get(name))
        if value != wanted:
            yield f"lora_request.{name} is {value!r}, not {wanted!r}"


def _sampling(found: SamplingParams, means: dict):
    defaults = SamplingParams()
    for name in set(means) - set(SamplingParams.__struct_fields__):
        yield f"there is no sampling_params.{name}"
    for name in SamplingParams.__struct_fields__:
        value, wanted = getattr(found, name), means.get(name, getattr(defaults, name))
        if name == "logit_bias" and wanted is not None:
            wanted = {int(token): bias for token, bias in wanted.items()}
        if name == "structured_outputs" and value is not None:
            defaults_of_it = asdict(type(value)(json_object=True)) | {"json_object": None}
            value, wanted = asdict(value), defaults_of_it | wanted
        elif is_dataclass(value):
            value = asdict(value)
        if isinstance(value, set):
            value, wanted = sorted(value), sorted(wanted)
        if value != wanted:
            yield f"sampling_params.{name} is {value!r}, not {wanted!r}"


def _features(found: list, wanted: list[dict], provider: _Provider):
    if len(found) != len(wanted):
        yield f"{len(found)} features, not {len(wanted)}"
        return
    for number, (feature, means) in enumerate(zip(found, wanted)):
        place = f"mm_features[{number}]"
        for name in ("modality", "identifier", "mm_hash"):
            if getattr(feature, name) != means[name]:
                yield f"{place}.{name} is {getattr(feature, name)!r}"
        position = feature.mm_position
        mask = None if position.is_embed is None else position.is_embed.tolist()
        as_meant = {"offset": position.offset, "length": position.length} | ({} if mask is None else {"is_embed": mask})
        if as_meant != means["mm_position"]:
            yield f"{place}.mm_position is {as_meant}"
        if feature.data is None or means["data"] is None:
            if feature.data is not means["data"]:
                yield f"{place}.data is {feature.data!r}"
            continue
        if list(feature.data) != list(means["data"]):
            yield f"{place}.data has {list(feature.data)}"
            continue
        for name, element in feature.data.items():
            yield from _element(f"{place}.data[{name}]", element, means["data"][name], provider)


def _element(place: str, element: Any, means: dict, provider: _Provider):
    kind, attributes = means["field"]
    field = element.field
    if type(field).__name__ != kind:
        yield f"{place} is a {type(field).__name__}"
        return
    for name, wanted in attributes.items():
        value = getattr(field, name)
        if name == "slices":
            value = [[part.start, part.stop, part.step] for part in value]
        if value != wanted:
            yield f"{place}.{name} is {value!r}"
    yield from _data(place, element.data, means, provider)


def _data(place: str, data: Any, means: dict, provider: _Provider):
    if "list" in means:
        if not isinstance(data, list) or len(data) != len(means["list"]):
            yield f"{place} is {data!r}"
            return
        for number, (part, wanted) in enumerate(zip(data, means["list"])):
            yield from _data(f"{place}[{number}]", part, wanted, provider)
    elif "number" in means:
        if type(data) is not type(means["number"]) or data != means["number"]:
            yield f"{place} is {data!r}"
    elif "handle" in means:
        asked = provider.asked.get(id(data))
        if asked != (means["dtype"], means["shape"], means["handle"]):
            yield f"{place} asks for {asked}"
    else:
        length = data.numel() * data.element_size()
        wanted = bytes((index * means["step"] + 3) % 251 for index in range(length))
        bits = bytes(data.contiguous().view(torch.uint8).flatten().tolist())
        if (str(data.dtype), list(data.shape)) != (f"torch.{means['dtype']}", means["shape"]) or bits != wanted:
            yield f"{place} is a {data.dtype} of {list(data.shape)} with other values"
