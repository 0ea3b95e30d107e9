"""A vLLM plugin: image tensors from shared memory that ``chiasm serve`` has written, without a copy.

``docs/shared-memory.md`` of Chiasm is the contract between the two.

- ``register`` is what vLLM calls in each of its processes.
- ``after_import`` waits until the engine core's module is there, in processes where it ever is.
- ``engine_hooks`` patches the engine core, or leaves it alone if it is not the one that is known here.
- ``provider`` stands between the engine's decoder and the arena, and notes what failed.
- ``handle`` is what a request says instead of a tensor's bytes.
- ``arena`` maps the frontend's file and makes tensors of its slots.

Beside the plugin, for engines that are started with it and loaded by vLLM alone:

- ``embedding_store`` is a connector by which engines of one machine give each other what their encoders made.
- ``embedding_folder`` is where it keeps that: whole files, within a bound.
"""

import logging

__version__ = "0.1.0"


def register() -> None:
    """Prepares this process for the day that it runs an engine core. Never raises; may be called again."""
    try:
        # Here and not above, so that a packaging tool can read the version where there is no vLLM.
        from chiasm_vllm.after_import import after_import
        from chiasm_vllm.engine_hooks import patch_or_warn

        after_import("vllm.v1.engine.core", patch_or_warn)
    except Exception:
        # vLLM would not start.
        logging.getLogger("vllm.chiasm_vllm").warning(
            "chiasm_vllm does not work with this vLLM. Images will come without shared memory.", exc_info=True
        )
