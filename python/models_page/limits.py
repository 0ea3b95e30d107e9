"""How many items of each modality a prompt may have: what a processing info of vLLM says of itself without a model's files."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

METHOD = "get_supported_mm_limits"


class NeedsFiles(BaseException):
    """The answer is in a model's files. No ``Exception``, so that nothing on the way catches it."""


class NoFiles:
    """In place of a model's files."""

    def __getattr__(self, name: str) -> object:
        raise NeedsFiles(name)


@dataclass(frozen=True)
class Limit:
    """``most`` is None for any number; not ``certain`` if a model's files decide whether there are any."""

    most: int | None
    certain: bool = True


def limits_of(info: type) -> dict[str, Limit]:
    """By modality; those that depend on a model's files as its source has them. Empty if it does not say any."""
    without_files: object = object.__new__(info)
    # Without ``__init__``, which may read files too.
    without_files.__dict__["ctx"] = NoFiles()
    try:
        limits = getattr(without_files, METHOD)()
    except (NeedsFiles, AttributeError):
        return written_limits(info)
    return {modality: Limit(most) for modality, most in limits.items()}


def written_limits(info: type) -> dict[str, Limit]:
    """Those that stand in the source of the method, and in that of the ones that it goes on to."""
    limits: dict[str, Limit] = {}
    for owner in info.__mro__:
        if METHOD not in owner.__dict__:
            continue
        function = ast.parse(textwrap.dedent(inspect.getsource(owner.__dict__[METHOD]))).body[0]
        for modality, limit in _entries(function, certain=not _ends_early(function)):
            limits.setdefault(modality, limit)
        if not any(isinstance(node, ast.Name) and node.id == "super" for node in ast.walk(function)):
            break
    return limits


def _ends_early(function: ast.AST) -> bool:
    branches = (node for node in ast.walk(function) if isinstance(node, ast.If))
    return any(isinstance(node, ast.Return) for branch in branches for node in ast.walk(branch))


def _entries(node: ast.AST, *, certain: bool) -> Iterator[tuple[str, Limit]]:
    """The modalities that are put into dictionaries in a piece of source."""
    pairs: list[tuple[ast.expr | None, ast.expr]] = []
    if isinstance(node, ast.Dict):
        pairs = list(zip(node.keys, node.values, strict=True))
    elif isinstance(node, ast.Assign):
        pairs = [(target.slice, node.value) for target in node.targets if isinstance(target, ast.Subscript)]
    for key, value in pairs:
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value, Limit(_number(value), certain)
    within = certain and not isinstance(node, ast.If | ast.IfExp)
    for child in ast.iter_child_nodes(node):
        yield from _entries(child, certain=within)


def _number(value: ast.expr) -> int | None:
    if isinstance(value, ast.Constant) and (value.value is None or isinstance(value.value, int)):
        return value.value
    raise ValueError(f"{METHOD} has a limit that is no number: {ast.unparse(value)}")
