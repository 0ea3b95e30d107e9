"""The patches of vLLM's engine core (vllm/v1/engine/core.py).

``EngineCoreProc.process_input_sockets`` is the input thread. For each message it decodes, and for an ADD it then
preprocesses what was decoded, all in turn. So:

- as the thread starts, the engine's ``tensor_ipc_receiver``, which its decoders use, becomes our provider;
- its ``MsgpackDecoder`` tells the provider where each message begins;
- ``preprocess_add_request`` raises if a handle in this message failed, which the thread answers with
  ``finish_reason`` 3 for this request;
- ``chiasm_attach`` is there for the frontend to call, as a utility method, from the engine's main loop.
"""

import functools
import inspect
from types import ModuleType
from typing import Any

from vllm.logger import init_logger

from chiasm_vllm.provider import Provider

# Below "vllm", whose handlers print it like the engine's own lines.
logger = init_logger("vllm.chiasm_vllm.engine_hooks")

# What process_input_sockets must use for the patches to have the effect that they are made for.
USED_BY_INPUT_THREAD = (
    "MsgpackDecoder",
    "tensor_ipc_receiver",
    "preprocess_add_request",
    "_handle_request_preproc_error",
)


def patch_or_warn(core: ModuleType) -> None:
    """Patches the engine core, once. If it is not built as known here it stays as it is: then the frontend finds no
    ``chiasm_attach`` and sends tensors inline. Never raises."""
    try:
        lacks = what_is_missing(core)
        if lacks is None:
            _patch(core)
    except Exception as error:
        lacks = f"{type(error).__name__}: {error}"
    if lacks is not None:
        logger.warning(
            "The engine core of vLLM %s is not as chiasm_vllm expects it (%s). Images will come without shared "
            "memory. Install a chiasm_vllm that knows this vLLM.",
            getattr(core, "VLLM_VERSION", "of unknown version"),
            lacks,
        )


def what_is_missing(core: ModuleType) -> str | None:
    """The first thing that the patches need and ``core`` does not have; None if it has all."""
    engine = getattr(core, "EngineCoreProc", None)
    if not inspect.isclass(engine):
        return "no EngineCoreProc"
    for method in ("process_input_sockets", "preprocess_add_request"):
        if not inspect.isfunction(getattr(engine, method, None)):
            return f"no EngineCoreProc.{method}"
    decoder = getattr(core, "MsgpackDecoder", None)
    if not inspect.isclass(decoder) or not inspect.isfunction(getattr(decoder, "decode", None)):
        return "no MsgpackDecoder.decode"
    if "oob_tensor_provider" not in inspect.signature(decoder).parameters:
        return "a MsgpackDecoder without oob_tensor_provider"
    used = inspect.unwrap(engine.process_input_sockets).__code__.co_names
    for name in USED_BY_INPUT_THREAD:
        if name not in used:
            return f"a process_input_sockets that does not use {name}"
    return None


def _patch(core: ModuleType) -> None:
    engine = core.EngineCoreProc
    if hasattr(engine, "chiasm_attach"):
        return
    process_input_sockets = engine.process_input_sockets
    preprocess_add_request = engine.preprocess_add_request

    @functools.wraps(process_input_sockets)
    def process_input_sockets_with_handles(self: Any, *args: Any, **kwargs: Any) -> None:
        self.tensor_ipc_receiver = Provider(self.tensor_ipc_receiver)
        process_input_sockets(self, *args, **kwargs)

    @functools.wraps(preprocess_add_request)
    def preprocess_add_request_unless_failed(self: Any, request: Any) -> Any:
        # Not so in an engine whose input thread is another's.
        if isinstance(self.tensor_ipc_receiver, Provider):
            failure = self.tensor_ipc_receiver.take_failure()
            if failure is not None:
                # The input thread keeps the request until the next one. What of it did resolve is free now.
                request.mm_features = None
                request.prompt_embeds = None
                raise ValueError(f"chiasm_vllm: {failure}")
        return preprocess_add_request(self, request)

    def chiasm_attach(self: Any, name: str) -> dict[str, str | int]:
        """Opens the frontend's arena of this file name; see ``Provider.attach``. Tells what READY does not, too."""
        if not isinstance(self.tensor_ipc_receiver, Provider):
            raise ValueError("this engine's input thread runs without chiasm_vllm")
        return self.tensor_ipc_receiver.attach(name) | encoder_cache_size(self)

    engine.process_input_sockets = process_input_sockets_with_handles
    engine.preprocess_add_request = preprocess_add_request_unless_failed
    core.MsgpackDecoder = _decoder_with_messages(core.MsgpackDecoder)
    # Last: who finds it finds the rest.
    engine.chiasm_attach = chiasm_attach


def encoder_cache_size(engine: Any) -> dict[str, int]:
    """How many embeddings the engine's encoder cache holds, for the frontend that has to guess it otherwise. Nothing if the scheduler is
    not as known here."""
    manager = getattr(getattr(engine, "scheduler", None), "encoder_cache_manager", None)
    size = getattr(manager, "cache_size", None)
    return {"encoder_cache_tokens": size} if isinstance(size, int) and size >= 0 else {}


def _decoder_with_messages(decoder: type) -> type:
    class MsgpackDecoderWithMessages(decoder):
        """Tells the provider where a message begins."""

        def decode(self, bufs: Any) -> Any:
            if isinstance(self.oob_tensor_provider, Provider):
                self.oob_tensor_provider.begin_message()
            return super().decode(bufs)

    return MsgpackDecoderWithMessages
