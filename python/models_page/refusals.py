"""Why Chiasm does not serve an architecture, where that can be told from vLLM's code alone."""

import ast
import inspect
from collections.abc import Iterator
from types import ModuleType

from vllm.renderers.hf import HfRenderer
from vllm.renderers.registry import RENDERER_REGISTRY

# Processors that take only what this package makes of a conversation need its tokenizer.
MISTRAL = "mistral_common"


def tokenizer_modes(config: ModuleType) -> dict[str, str]:
    """The architectures that vLLM has tokenizers or renderers of its own for, and the mode that it takes for each: a
    chain of comparisons in ``ModelConfig``."""
    modes: dict[str, str] = {}
    for node in ast.walk(ast.parse(inspect.getsource(config))):
        if isinstance(node, ast.If) and (mode := _mode(node.body[0])):
            modes.update(dict.fromkeys(_compared_with_arch(node.test), mode))
    if not modes:
        raise ValueError("vLLM does not choose tokenizer modes by architecture as it did: see tokenizer_modes")
    return modes


def _mode(statement: ast.stmt) -> str | None:
    match statement:
        case ast.Assign(targets=[ast.Attribute(attr="tokenizer_mode")], value=ast.Constant(value=str() as mode)):
            return mode
    return None


def _compared_with_arch(test: ast.expr) -> Iterator[str]:
    match test:
        case ast.Compare(left=ast.Name(id="arch"), comparators=[others]):
            for node in ast.walk(others):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def writes_conversations(mode: str) -> bool:
    """Whether a mode is there for its renderer; else it is for the tokenizer, and the model's chat template writes conversations."""
    return not issubclass(RENDERER_REGISTRY.load_renderer_cls(mode), HfRenderer)


def needs_mistral(processor: type) -> bool:
    """Whether the module of a processor reads prompts that only Mistral's own tokenizer writes."""
    module = inspect.getmodule(processor)
    return module is not None and any(
        (getattr(value, "__module__", None) or "").startswith(MISTRAL) for value in vars(module).values()
    )
