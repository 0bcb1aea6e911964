"""The part of the build that pyproject.toml cannot say: the compiled kernels, which are optional."""

from pathlib import Path

from setuptools import Extension, setup

KERNELS = Path("formats") / "kernels"
SOURCES = ("native", "native_call", "native_products", "path_portable", "path_avx2", "path_avx512", "path_avx512_vnni")

setup(
    ext_modules=[
        Extension(
            "formats.kernels._native",
            sources=[str(KERNELS / f"{name}.c") for name in SOURCES],
            depends=[str(header) for header in sorted(KERNELS.glob("*.h"))],
            # Contraction would fuse multiply and add where a path happens to have the instruction; -O3 vectorises.
            extra_compile_args=[
                "-std=c11",
                "-O3",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-Wall",
                "-Wextra",
            ],
            py_limited_api=True,
            optional=True,  # without a compiler the package installs all the same and runs on the numpy twins
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
