"""The engine's tensor provider: resolves handles in the attached arena and records failures."""

import os
from collections.abc import Callable

import torch
from vllm.logger import init_logger

from chiasm_vllm import __version__
from chiasm_vllm.arena import LAYOUT, Arena
from chiasm_vllm.handle import Handle, HandleRefused

# A child of the logger "vllm", whose handlers print these lines like the engine's own.
logger = init_logger("vllm.chiasm_vllm.provider")

TensorProvider = Callable[[str, tuple[int, ...], dict], torch.Tensor]


class Provider:
    """The out-of-band tensor provider of an engine.

    It implements ``OOBTensorProvider`` of vllm/v1/serial_utils.py. The decoder's thread calls
    ``begin_message``, the provider itself and ``take_failure``. ``attach`` may be called from
    another thread.
    """

    def __init__(self, fallback: TensorProvider | None) -> None:
        """Creates a provider without an arena.

        ``fallback`` is the engine's own provider. It receives the maps that are not handles.
        """
        self._fallback = fallback
        self._arena: Arena | None = None
        self._failure: str | None = None
        self._logged_causes: set[str] = set()

    def attach(self, name: str) -> dict[str, str | int]:
        """Opens an arena and returns the plugin's version, arena layout and process id.

        The arena replaces the current one for new handles. Raises ValueError or OSError, and then
        keeps the current one.
        """
        arena = Arena(name)
        # A single assignment, because the decoder's thread reads it concurrently.
        self._arena = arena
        logger.info("Attached %s: %d bytes, %d leases.", arena.name, arena.length, arena.leases)
        return {"plugin": __version__, "layout": LAYOUT, "pid": os.getpid()}

    def begin_message(self) -> None:
        """Discards the recorded failure. Must be called before each message is decoded.

        A message can fail and never be preprocessed. Its failure must not be attributed to the
        next message.
        """
        self._failure = None

    def take_failure(self) -> str | None:
        """Returns and clears the reason why this message's first failed handle was refused."""
        failure = self._failure
        self._failure = None
        return failure

    def __call__(self, dtype: str, shape: tuple[int, ...], fields: dict) -> torch.Tensor:
        """Returns the tensor of ``fields``.

        If a handle cannot be resolved, records the reason and returns an empty tensor, because an
        exception would end the engine's input thread.
        """
        if "chiasm" not in fields and self._fallback is not None:
            return self._fallback(dtype, shape, fields)
        try:
            return self._resolve(dtype, shape, fields)
        except HandleRefused as refusal:
            self._record_failure(refusal.cause, str(refusal))
        except Exception as error:
            self._record_failure(type(error).__name__, f"{type(error).__name__}: {error}")
        return torch.empty(0)

    def _resolve(self, dtype: object, shape: object, fields: dict) -> torch.Tensor:
        if "chiasm" not in fields:
            raise HandleRefused(
                "an out-of-band tensor that is no handle, and this engine takes no others"
            )
        handle = Handle.parse(fields)
        arena = self._arena
        if arena is None:
            raise HandleRefused("a handle, and no arena is attached")
        return arena.resolve(dtype, shape, handle)

    def _record_failure(self, cause: str, failure: str) -> None:
        if self._failure is None:
            self._failure = failure
        # Causes are a few fixed texts, so both this set and the log are bounded.
        if cause not in self._logged_causes:
            self._logged_causes.add(cause)
            logger.warning(
                "Refused a request: %s. Further refusals for this cause are not logged here.",
                failure,
            )
