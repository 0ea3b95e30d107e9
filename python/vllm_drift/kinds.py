"""The kinds of facts about vLLM. ``relied_on.py`` lists the facts, and ``facts.py`` reads them.

Paths are relative to the package ``vllm``. A definition that is not in its file is searched by name
in all of vLLM.
"""

from dataclasses import dataclass


class Named:
    """Definitions in one module. ``NAME was OLD_NAME`` is searched under both names."""

    def __init__(self, path: str, *names: str) -> None:
        self.path = path
        self.names = tuple(name.partition(" was ")[0] for name in names)
        former = (name.partition(" was ") for name in names)
        self.former = {name: old for name, _, old in former if old}


class Fields(Named):
    """Data classes: their bases and options, and each field with its annotation and default.

    Fields that are encoded by position include their position.
    """


class Code(Named):
    """Functions: their signature and a digest of the body.

    ``Class.method`` is a method. ``Class`` stands for a class's bases and decorators, and
    ``Class.*`` for these and all methods and attributes.
    """


class Values(Named):
    """Constants of a module, or of a class as ``Class.NAME``."""


@dataclass(frozen=True)
class Keys:
    """Entries of a dictionary in a module: those with these keys, or all."""

    path: str
    dictionary: str
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Variables:
    """Environment variables (``envs.py``)."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Flags:
    """Flags of ``vllm serve``, with the arguments that define them in its parser."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class AllFlags:
    """The names of all flags of ``vllm serve``, added by name or derived from a class's fields."""


@dataclass(frozen=True)
class Requirements:
    """The wheel's requirements on these packages."""

    packages: tuple[str, ...]


Kind = Fields | Code | Values | Keys | Variables | Flags | AllFlags | Requirements


@dataclass(frozen=True)
class Group:
    """Facts with the same reason and the same files of ours."""

    # The name in manifests.
    name: str
    reason: str
    our_files: tuple[str, ...]
    relied_on: tuple[Kind, ...]
