"""Stand-ins for packages built for GPUs, with which SGLang can be imported and run on a CPU.

Python imports this module by its name at every start, also in SGLang's child processes. Each
stand-in is a module that has every attribute. Calling an attribute raises, so a stand-in never
computes anything. Torch operators that a CPU build of SGLang's kernels would register have
stand-ins too.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types

PACKAGES = {
    "cutlass",
    "deep_gemm",
    "flash_attn",
    "flash_mla",
    "flashinfer",
    "humming",
    "nvshmem",
    "quack",
    "sgl_flash_mla",
    "sgl_kernel",
    "tilelang",
}

# Newer than the versions of these packages that SGLang requires.
VERSION = "99.0"


class Absent:
    """An attribute of a missing package: a name, type, decorator or list. Calling it raises."""

    def __init__(self, name):
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")

    def __call__(self, *_, **__):
        raise NotImplementedError(f"{self.__name__} is a stand-in, this environment has no kernels")

    # Absent types are used in annotations and as base classes.
    def __getitem__(self, _):
        return self

    def __or__(self, _):
        return self

    __ror__ = __or__

    def __mro_entries__(self, _):
        return (object,)


class AbsentModule(types.ModuleType):
    """A module of a missing package."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


class AbsentModuleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads a stand-in for every module of the missing packages."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = AbsentModule(spec.name)
        module.__version__ = VERSION
        return module

    def exec_module(self, module):
        module.__path__ = []


def add_absent_operators():
    """Adds stand-ins for the operators of SGLang's CPU kernels to torch.

    SGLang reads these operators from torch when it is imported, whether or not it calls them later.
    """
    from torch._ops import _OpNamespace

    get_operator = _OpNamespace.__getattr__

    def get_operator_or_stand_in(self, name):
        try:
            return get_operator(self, name)
        except AttributeError:
            if self.name == "sgl_kernel" and name.endswith("_cpu"):
                return Absent(f"torch.ops.sgl_kernel.{name}")
            raise

    _OpNamespace.__getattr__ = get_operator_or_stand_in


sys.meta_path.insert(0, AbsentModuleFinder())
if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    add_absent_operators()
