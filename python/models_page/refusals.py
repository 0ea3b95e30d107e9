"""Reasons why Chiasm does not serve an architecture, as far as vLLM's code alone reveals them."""

import ast
import inspect
from collections.abc import Iterator
from types import ModuleType

from vllm.renderers.hf import HfRenderer
from vllm.renderers.registry import RENDERER_REGISTRY

# A processor that uses this package needs Mistral's tokenizer: it accepts only conversations
# written by this package.
MISTRAL = "mistral_common"


def tokenizer_modes(config: ModuleType) -> dict[str, str]:
    """Returns the tokenizer mode of each architecture for which vLLM has its own code.

    The code is a tokenizer or a renderer. vLLM selects the mode by a chain of comparisons in
    ``ModelConfig``.
    """
    modes: dict[str, str] = {}
    for node in ast.walk(ast.parse(inspect.getsource(config))):
        if isinstance(node, ast.If) and (mode := _assigned_mode(node.body[0])):
            modes.update(dict.fromkeys(_compared_with_arch(node.test), mode))
    if not modes:
        raise ValueError(
            "vLLM does not choose tokenizer modes by architecture as it did: see tokenizer_modes"
        )
    return modes


def _assigned_mode(statement: ast.stmt) -> str | None:
    match statement:
        case ast.Assign(
            targets=[ast.Attribute(attr="tokenizer_mode")],
            value=ast.Constant(value=str() as mode),
        ):
            return mode
    return None


def _compared_with_arch(test: ast.expr) -> Iterator[str]:
    match test:
        case ast.Compare(left=ast.Name(id="arch"), comparators=[others]):
            for node in ast.walk(others):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def writes_conversations(mode: str) -> bool:
    """Returns True if a mode has a renderer that writes conversations by code.

    Otherwise the mode only selects a tokenizer, and the model's chat template writes conversations.
    """
    return not issubclass(RENDERER_REGISTRY.load_renderer_cls(mode), HfRenderer)


def needs_mistral(processor: type) -> bool:
    """Returns True if a processor's module reads prompts that only Mistral's tokenizer writes."""
    module = inspect.getmodule(processor)
    if module is None:
        return False
    modules = (getattr(value, "__module__", None) or "" for value in vars(module).values())
    return any(name.startswith(MISTRAL) for name in modules)
