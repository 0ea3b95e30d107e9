"""A vLLM plugin that passes image tensors through shared memory written by ``chiasm serve``.

Tensors are not copied. Chiasm's ``docs/shared-memory.md`` is the contract between the two sides.

- ``register`` is the entry point that vLLM calls in each of its processes.
- ``after_import`` runs a callback once a process imports the engine core's module.
- ``engine_hooks`` patches the engine core, or leaves an unknown engine core unchanged.
- ``provider`` connects the engine's decoder to the arena and records failures.
- ``handle`` defines the handle that a request carries in place of a tensor's bytes.
- ``arena`` maps the frontend's file and creates tensors from its slots.

Two modules are not part of the plugin. Only vLLM loads them, in engines that are configured so:

- ``embedding_store`` is a connector that shares encoder outputs between engines of one machine.
- ``embedding_folder`` is its storage: a folder of complete files with a size limit.
"""

import logging

__version__ = "0.1.0"


def register() -> None:
    """Prepares this process for patching, in case it runs an engine core.

    Never raises. Idempotent.
    """
    try:
        # Imported here, so that a packaging tool can read the version without vLLM.
        from chiasm_vllm.after_import import after_import
        from chiasm_vllm.engine_hooks import patch_or_warn

        after_import("vllm.v1.engine.core", patch_or_warn)
    except Exception:
        # An exception would keep vLLM from starting.
        logging.getLogger("vllm.chiasm_vllm").warning(
            "chiasm_vllm does not work with this vLLM. Images will come without shared memory.",
            exc_info=True,
        )
