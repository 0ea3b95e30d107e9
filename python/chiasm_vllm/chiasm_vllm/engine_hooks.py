"""The patches of vLLM's engine core (vllm/v1/engine/core.py).

``EngineCoreProc.process_input_sockets`` runs the input thread. It decodes one message after the
other and preprocesses each decoded ADD. The patches:

- When the thread starts, our provider replaces the engine's ``tensor_ipc_receiver``, which its
  decoders use.
- Its ``MsgpackDecoder`` calls the provider at the start of each message.
- ``preprocess_add_request`` raises if a handle in this message failed. The input thread then ends
  this request with ``finish_reason`` 3.
- The new utility method ``chiasm_attach``, which the frontend calls, runs in the engine's main
  loop.
"""

import functools
import inspect
from types import ModuleType
from typing import Any

from vllm.logger import init_logger

from chiasm_vllm.provider import Provider

# A child of the logger "vllm", whose handlers print these lines like the engine's own.
logger = init_logger("vllm.chiasm_vllm.engine_hooks")

# The names that process_input_sockets must use. Otherwise the patches would have no effect.
USED_BY_INPUT_THREAD = (
    "MsgpackDecoder",
    "tensor_ipc_receiver",
    "preprocess_add_request",
    "_handle_request_preproc_error",
)


def patch_or_warn(core: ModuleType) -> None:
    """Patches the engine core once. Never raises.

    An engine core with an unknown structure is not changed. The frontend then finds no
    ``chiasm_attach`` and sends tensors inline.
    """
    try:
        missing = find_missing(core)
        if missing is None:
            _patch(core)
    except Exception as error:
        missing = f"{type(error).__name__}: {error}"
    if missing is not None:
        logger.warning(
            "The engine core of vLLM %s is not as chiasm_vllm expects it (%s). Images will come "
            "without shared memory. Install a chiasm_vllm that knows this vLLM.",
            getattr(core, "VLLM_VERSION", "of unknown version"),
            missing,
        )


def find_missing(core: ModuleType) -> str | None:
    """Returns the first requirement of the patches that ``core`` lacks; None if it has all."""
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
    used_names = inspect.unwrap(engine.process_input_sockets).__code__.co_names
    for name in USED_BY_INPUT_THREAD:
        if name not in used_names:
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
        # False in an engine whose input thread was replaced by other code.
        if isinstance(self.tensor_ipc_receiver, Provider):
            failure = self.tensor_ipc_receiver.take_failure()
            if failure is not None:
                # The input thread keeps the request until the next one. Its resolved tensors are
                # released now.
                request.mm_features = None
                request.prompt_embeds = None
                raise ValueError(f"chiasm_vllm: {failure}")
        return preprocess_add_request(self, request)

    def chiasm_attach(self: Any, name: str) -> dict[str, str | int]:
        """Opens the frontend's arena with this file name; see ``Provider.attach``.

        The result also contains facts that the engine's READY message lacks.
        """
        if not isinstance(self.tensor_ipc_receiver, Provider):
            raise ValueError("this engine's input thread runs without chiasm_vllm")
        return self.tensor_ipc_receiver.attach(name) | encoder_cache_size(self)

    engine.process_input_sockets = process_input_sockets_with_handles
    engine.preprocess_add_request = preprocess_add_request_unless_failed
    core.MsgpackDecoder = _with_message_starts(core.MsgpackDecoder)
    # Last: its presence means that all other patches are in place.
    engine.chiasm_attach = chiasm_attach


def encoder_cache_size(engine: Any) -> dict[str, int]:
    """Returns the capacity of the engine's encoder cache in embeddings.

    The frontend would have to guess it otherwise. Empty if the scheduler has an unknown structure.
    """
    manager = getattr(getattr(engine, "scheduler", None), "encoder_cache_manager", None)
    size = getattr(manager, "cache_size", None)
    return {"encoder_cache_tokens": size} if isinstance(size, int) and size >= 0 else {}


def _with_message_starts(decoder: type) -> type:
    class MsgpackDecoderWithMessageStarts(decoder):
        """A decoder that calls ``Provider.begin_message`` at the start of each message."""

        def decode(self, bufs: Any) -> Any:
            if isinstance(self.oob_tensor_provider, Provider):
                self.oob_tensor_provider.begin_message()
            return super().decode(bufs)

    return MsgpackDecoderWithMessageStarts
