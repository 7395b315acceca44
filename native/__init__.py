"""Builds the project's C++ kernels at first use and loads them with ctypes.

``moe`` and ``offload`` each have a kernel of their own and must not import each other. They share the build, which is
in this package below both of them. It imports neither of them, nor ``m6``, nor PyTorch.

A kernel is a single C++ file with a plain C interface. Such a file compiles in about two seconds; an extension with
PyTorch's headers takes half a minute.
"""

from native.build import load_library, processor_name, remembered

__all__ = ["load_library", "processor_name", "remembered"]
