"""Limits on the items of each modality in a prompt, read from vLLM's code without model files."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

METHOD = "get_supported_mm_limits"


class NeedsFiles(BaseException):
    """The answer is in a model's files.

    Not an ``Exception``, so that vLLM's code never catches it.
    """


class NoFiles:
    """A stand-in for a model's files that raises on every access."""

    def __getattr__(self, name: str) -> object:
        raise NeedsFiles(name)


@dataclass(frozen=True)
class Limit:
    """The limit of a modality.

    ``most`` is None for any number. ``certain`` is False if a model's files decide whether it
    takes any items.
    """

    most: int | None
    certain: bool = True


def limits_of(info: type) -> dict[str, Limit]:
    """Returns the limits by modality of a processing info class.

    If they depend on a model's files, returns those in its source, which may be none.
    """
    without_files: object = object.__new__(info)
    # Created without ``__init__``, which may also read files.
    without_files.__dict__["ctx"] = NoFiles()
    try:
        limits = getattr(without_files, METHOD)()
    except (NeedsFiles, AttributeError):
        return limits_in_source(info)
    return {modality: Limit(most) for modality, most in limits.items()}


def limits_in_source(info: type) -> dict[str, Limit]:
    """Returns the limits in the source of the method, and of the methods that it calls by super."""
    limits: dict[str, Limit] = {}
    for owner in info.__mro__:
        if METHOD not in owner.__dict__:
            continue
        source = textwrap.dedent(inspect.getsource(owner.__dict__[METHOD]))
        function = ast.parse(source).body[0]
        for modality, limit in _entries(function, certain=not _returns_early(function)):
            limits.setdefault(modality, limit)
        names = (node.id for node in ast.walk(function) if isinstance(node, ast.Name))
        if "super" not in names:
            break
    return limits


def _returns_early(function: ast.AST) -> bool:
    branches = (node for node in ast.walk(function) if isinstance(node, ast.If))
    return any(isinstance(node, ast.Return) for branch in branches for node in ast.walk(branch))


def _entries(node: ast.AST, *, certain: bool) -> Iterator[tuple[str, Limit]]:
    """Yields the modalities that a piece of source puts into dictionaries."""
    pairs: list[tuple[ast.expr | None, ast.expr]] = []
    if isinstance(node, ast.Dict):
        pairs = list(zip(node.keys, node.values, strict=True))
    elif isinstance(node, ast.Assign):
        subscripts = (target for target in node.targets if isinstance(target, ast.Subscript))
        pairs = [(target.slice, node.value) for target in subscripts]
    for key, value in pairs:
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value, Limit(_parse_number(value), certain)
    certain_below = certain and not isinstance(node, ast.If | ast.IfExp)
    for child in ast.iter_child_nodes(node):
        yield from _entries(child, certain=certain_below)


def _parse_number(value: ast.expr) -> int | None:
    if isinstance(value, ast.Constant) and (value.value is None or isinstance(value.value, int)):
        return value.value
    raise ValueError(f"{METHOD} has a limit that is no number: {ast.unparse(value)}")
