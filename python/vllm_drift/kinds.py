"""The kinds of things of vLLM that can be relied on. ``relied_on.py`` lists them, ``facts.py`` reads them out.

Paths are relative to the package ``vllm``. A definition that has moved is looked for by its name in all of vLLM.
"""

from dataclasses import dataclass


class Named:
    """Definitions in one module. ``NAME was OLD_NAME`` is looked for under both."""

    def __init__(self, path: str, *names: str) -> None:
        self.path = path
        self.names = tuple(name.partition(" was ")[0] for name in names)
        former = (name.partition(" was ") for name in names)
        self.former = {name: old for name, _, old in former if old}


class Fields(Named):
    """Classes that are data: their bases and options, and each field with its annotation and its default. Where the fields travel
    by position, each says which."""


class Code(Named):
    """Functions: signature and digest of the body. ``Class.method`` is a method, ``Class`` its bases and decorators, ``Class.*``
    those with all methods and attributes."""


class Values(Named):
    """Constants of a module, or attributes of a class as ``Class.NAME``."""


@dataclass(frozen=True)
class Keys:
    """Entries of a dict in a module: these, or all of them."""

    path: str
    dictionary: str
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Variables:
    """Environment variables (``envs.py``)."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Flags:
    """Flags of ``vllm serve``, as they are added to its parser."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class EveryFlag:
    """The names of all flags of ``vllm serve``: added by name, or made of the fields of a class."""


@dataclass(frozen=True)
class Requirements:
    """What the wheel asks for of these packages."""

    packages: tuple[str, ...]


Kind = Fields | Code | Values | Keys | Variables | Flags | EveryFlag | Requirements


@dataclass(frozen=True)
class Group:
    """Things that matter for one reason and in the same of our files."""

    name: str
    what: str
    ours: tuple[str, ...]
    relied_on: tuple[Kind, ...]
