"""Stands between the engine's decoder and the arena."""

import os
from collections.abc import Callable

import torch
from vllm.logger import init_logger

from chiasm_vllm import __version__
from chiasm_vllm.arena import LAYOUT, Arena
from chiasm_vllm.handle import Handle, HandleRefused

# Below "vllm", whose handlers print it like the engine's own lines.
logger = init_logger("vllm.chiasm_vllm.provider")

TensorProvider = Callable[[str, tuple[int, ...], dict], torch.Tensor]


class Provider:
    """The out-of-band tensor provider of one engine (``OOBTensorProvider`` in vllm/v1/serial_utils.py).

    The decoder's thread calls ``begin_message``, the provider itself and ``take_failure``; ``attach`` may be called
    from another one.
    """

    def __init__(self, former: TensorProvider | None) -> None:
        """``former`` is what the engine would have used: it gets the maps that are no handles."""
        self._former = former
        self._arena: Arena | None = None
        self._failure: str | None = None
        self._logged: set[str] = set()

    def attach(self, name: str) -> dict[str, str | int]:
        """Opens an arena, which replaces the one before for new handles, and says who we are.

        Raises ValueError or OSError and keeps the one before.
        """
        arena = Arena(name)
        # One assignment, because the decoder's thread reads it meanwhile.
        self._arena = arena
        logger.info("Attached %s: %d bytes, %d leases.", arena.name, arena.length, arena.leases)
        return {"plugin": __version__, "layout": LAYOUT, "pid": os.getpid()}

    def begin_message(self) -> None:
        """Forgets what failed. To be called before each message is decoded, so that a failure in one that was never
        preprocessed, whyever, can't be taken for one in the next."""
        self._failure = None

    def take_failure(self) -> str | None:
        """Why the first handle in this message that could not be resolved could not, and forgets it."""
        failure, self._failure = self._failure, None
        return failure

    def __call__(self, dtype: str, shape: tuple[int, ...], fields: dict) -> torch.Tensor:
        """The tensor that ``fields`` stands for. If it is a handle and does not resolve, notes why and returns an
        empty tensor: an exception would end the engine's input thread."""
        if "chiasm" not in fields and self._former is not None:
            return self._former(dtype, shape, fields)
        try:
            return self._resolve(dtype, shape, fields)
        except HandleRefused as refusal:
            self._note(refusal.cause, str(refusal))
        except Exception as error:
            self._note(type(error).__name__, f"{type(error).__name__}: {error}")
        return torch.empty(0)

    def _resolve(self, dtype: object, shape: object, fields: dict) -> torch.Tensor:
        if "chiasm" not in fields:
            raise HandleRefused("an out-of-band tensor that is no handle, and this engine takes no others")
        handle = Handle.parse(fields)
        arena = self._arena
        if arena is None:
            raise HandleRefused("a handle, and no arena is attached")
        return arena.resolve(dtype, shape, handle)

    def _note(self, cause: str, failure: str) -> None:
        if self._failure is None:
            self._failure = failure
        # Causes are few fixed texts, so both this set and the log are bounded.
        if cause not in self._logged:
            self._logged.add(cause)
            logger.warning("Refused a request: %s. More of this kind are not logged here.", failure)
