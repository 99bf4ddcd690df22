"""The one thing that pyproject.toml cannot say: the extension ``sixfold.blending._native`` is built from native/*.c.

    native/*.c, native/*.h --> setup.py (this file) --> sixfold/blending/_native.abi3.so

It is optional: where no compiler is, the installation goes through without it and numpy does the same
(docs/decisions/blending.md). For work on the sources: ``python setup.py build_ext --inplace``.
"""

import sys
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path(__file__).parent
SOURCES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("native/*.c"))
HEADERS = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("native/*.h"))
# Less to install, and not slower: no C function throws or is unwound, and nobody calls one by its name.
SMALL = ["-fno-asynchronous-unwind-tables", "-ffunction-sections", "-fdata-sections"]
STRIPPED = ["-Wl,-s", "-Wl,--gc-sections"] if sys.platform == "linux" else []  # of GNU's linker and lld

native = Extension(
    "sixfold.blending._native",
    sources=SOURCES,
    depends=HEADERS,
    define_macros=[("Py_LIMITED_API", "0x030B0000")],  # 3.11, the first with buffers in it
    py_limited_api=True,
    libraries=["m"],  # sqrt: not every Python brings it along
    # A fused multiply-add changes the order of megatron-core's blends.
    extra_compile_args=["-O3", "-ffp-contract=off", "-fvisibility=hidden", "-g0", *SMALL],
    extra_link_args=STRIPPED,
    optional=True,
)

setup(ext_modules=[native], options={"bdist_wheel": {"py_limited_api": "cp311"}})
