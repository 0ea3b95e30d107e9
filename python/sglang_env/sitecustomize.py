"""Lets SGLang be imported and run on a CPU without the packages that are built for GPUs.

Python imports this by its name at every start, in SGLang's child processes too. In place of each such package there is a module that
has whatever is asked of it; calling any of that raises, so nothing is ever computed by a stand-in. The same goes for the operators that
a build of SGLang's kernels for CPUs would register with torch.
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

# Newer than what SGLang asks of any of them.
VERSION = "99.0"


class Absent:
    """Something of a package that is not there: a name, a type, a decorator, a list, but nothing that runs."""

    def __init__(self, name):
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")

    def __call__(self, *_, **__):
        raise NotImplementedError(f"{self.__name__} is a stand-in, this environment has no kernels")

    # Names of absent types stand in annotations and among the bases of classes.
    def __getitem__(self, _):
        return self

    def __or__(self, _):
        return self

    __ror__ = __or__

    def __mro_entries__(self, _):
        return (object,)


class AbsentModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
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


def let_operators_be_absent():
    """SGLang takes operators of its CPU kernels off torch when it is imported, long before it knows whether it will call them."""
    from torch._ops import _OpNamespace

    found = _OpNamespace.__getattr__

    def find(self, name):
        try:
            return found(self, name)
        except AttributeError:
            if self.name == "sgl_kernel" and name.endswith("_cpu"):
                return Absent(f"torch.ops.sgl_kernel.{name}")
            raise

    _OpNamespace.__getattr__ = find


sys.meta_path.insert(0, Finder())
if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    let_operators_be_absent()
