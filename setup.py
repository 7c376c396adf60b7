"""Builds the extension `ampfast._C` and the CUDA kernels; other metadata is in pyproject.toml."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

OLDEST_TORCH = (2, 10)
# Architectures of the CUDA kernels; those that nvcc does not know are left out. Others run the PTX
# of the lowest.
CUDA_ARCHITECTURES = ("70", "75", "80", "86", "89", "90", "100", "120")
# The compiled CUDA kernels, which the core loads, and what they are compiled from.
KERNELS = Path(__file__).parent / "ampfast/kernels.fatbin"
KERNEL_SOURCES = (
    *("cuda/multi_tensor.cu", "cuda/*.cuh", "cuda/multi_tensor.h"),
    *("element.h", "scale.h", "table_layout.h", "track.h"),
)
# The default scheme of Debian's and Ubuntu's Python 3.10 names a folder under /usr/local.
HEADERS = sysconfig.get_path("include", "posix_prefix")
# Settings besides the sources that change the build.
BUILD_VARIABLES = (
    *("CUDA_HOME", "CUDA_PATH", "CC", "CXX"),
    *("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS"),
)


def installed_torch() -> metadata.Distribution:
    """Returns the torch of this interpreter, without importing it; exits if there is none."""
    wanted = "torch>={}.{}".format(*OLDEST_TORCH)
    advice = f"run `{sys.executable} -m pip install '{wanted}'` first"
    try:
        torch = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        raise SystemExit(f"ampfast is built against torch, which is missing: {advice}") from None
    if tuple(int(part) for part in torch.version.split(".")[:2]) < OLDEST_TORCH:
        raise SystemExit(f"ampfast needs {wanted}, this is torch {torch.version}: {advice}")
    return torch


def fits(torch_version: str) -> tuple[str, str]:
    """Returns version label and requirement of the torch that a build is for.

    torch keeps its binary interface within a minor version, so that a build is for one of these:
    "+torch2.13" and "torch==2.13.*".
    """
    minor = ".".join(torch_version.split(".")[:2])
    return f"+torch{minor}", f"torch=={minor}.*"


def served_by(cores: list[str]) -> str:
    """Returns the requirement of a wheel with these cores, such as "torch>=2.11,<2.14,!=2.12.*".

    Args:
        cores: Names of their folders, "torch2.11" and "torch2.13".
    """
    minors = sorted(int(re.fullmatch(r"torch2\.(\d+)", name)[1]) for name in cores)
    gaps = sorted(set(range(minors[0], minors[-1])) - set(minors))
    bounds = [f">=2.{minors[0]}", f"<2.{minors[-1] + 1}", *(f"!=2.{gap}.*" for gap in gaps)]
    return "torch" + ",".join(bounds)


def require_toolchain() -> None:
    """Exits with one line of advice if C++ cannot be compiled here."""
    if sys.platform == "win32":
        return  # setuptools finds MSVC off the PATH
    # torch's build compiles with $CXX, or c++.
    compiler = os.environ.get("CXX", "c++").split()
    if not compiler or shutil.which(compiler[0]) is None:
        raise SystemExit(
            f"no C++ compiler: `{' '.join(compiler)}` was not found; install one "
            "(apt install g++ | dnf install gcc-c++ | xcode-select --install) or set CXX"
        )
    if not Path(HEADERS, "Python.h").exists():
        raise SystemExit(
            f"no Python headers: {HEADERS}/Python.h is missing; install them "
            "(apt install python3-dev | dnf install python3-devel)"
        )


def build_key() -> str:
    """Returns a text that changes when an earlier extension must be rebuilt."""
    torch = installed_torch()
    where = str(torch.locate_file("torch"))
    parts = [sys.version, platform.machine(), torch.version, where]
    parts += [f"{name}={os.environ.get(name)}" for name in BUILD_VARIABLES]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command; one that does not start, as of another processor, fails like any other."""
    try:
        return subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def find_nvcc() -> str | None:
    """Returns the path of nvcc inside its toolkit; the one on the PATH may be a wrapper script."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if not home and (on_path := shutil.which("nvcc")):
        dry_run = [on_path, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
        top = re.search(r"^#\$ TOP=(.+)$", run(dry_run).stderr, re.MULTILINE)
        home = top[1].strip() if top else os.path.join(os.path.dirname(on_path), os.pardir)
    home = os.path.realpath(home or "/usr/local/cuda")
    return shutil.which("nvcc", path=os.path.join(home, "bin"))


def targets(nvcc: str) -> list[str]:
    """Returns flags for the architectures that `nvcc` knows, with PTX for newer ones."""
    known = run([nvcc, "--list-gpu-code"]).stdout.split()
    chosen = [number for number in CUDA_ARCHITECTURES if f"sm_{number}" in known]
    codes = [(number, f"sm_{number}") for number in chosen]
    codes += [(number, f"compute_{number}") for number in chosen[:1]]
    return [f"-gencode=arch=compute_{number},code={code}" for number, code in codes]


def nvcc_flags() -> list[str]:
    """Returns the CUDA compiler's flags; architectures are compiled in parallel."""
    return ["-O3", "--fmad=false", "-std=c++17", "--threads", str(os.cpu_count() or 1)]


def build_kernels() -> str:
    """Compiles the CUDA kernels where nvcc is; returns why there are none, or an empty text."""
    sources = [Path(__file__).parent / name for name in found(*KERNEL_SOURCES)]
    if KERNELS.exists() and KERNELS.stat().st_mtime >= max(s.stat().st_mtime for s in sources):
        return ""
    KERNELS.unlink(missing_ok=True)
    nvcc = find_nvcc()
    if nvcc is None:
        return "nvcc was not found: set CUDA_HOME or put it on the PATH"
    unfinished = KERNELS.with_suffix(f".{os.getpid()}")
    source = next(str(source) for source in sources if source.suffix == ".cu")
    compiling = [*nvcc_flags(), *targets(nvcc), "-fatbin", "-o", str(unfinished), source]
    tried = run([nvcc, *compiling])
    if tried.returncode == 0:
        unfinished.replace(KERNELS)
        return ""
    unfinished.unlink(missing_ok=True)
    lines = tried.stderr.splitlines() or [f"exit code {tried.returncode}"]
    errors = [line for line in lines if re.search("error|fatal", line)]
    return f"nvcc does not compile them: {(errors or lines)[0].strip()}"


def say_what_is_left_out(why: str) -> None:
    """Prints one line about a build without CUDA kernels, if so; the Makefile shows it."""
    if why:
        print(
            f"ampfast is built without CUDA kernels, as {why}. Nothing is lost: Triton's kernels "
            "serve GPUs.",
            file=sys.stderr,
        )


def compile_flags(include_dirs: list[str]) -> tuple[list[str], list[str]]:
    """Returns the C++ compiler's and the linker's flags; the C++ standard is left to torch."""
    if sys.platform == "win32":
        return ["/O2", "/fp:strict", "/openmp"], []
    # Results must equal torch's bit for bit: no fast-math, no fused multiply-add; and one binary
    # must run everywhere: no -march=native.
    compiling = [
        "-O3",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fvisibility=hidden",
        "-g0",
    ]
    compiling += ["-Wall", "-Wextra"]
    # As system folders, too, so that only warnings of our own sources show.
    for folder in include_dirs:
        compiling += ["-isystem", folder]
    # at::parallel_for is a header that is serial without OpenMP. libgomp resolves to torch's own
    # copy, which is loaded first and has the same name.
    openmp = ["-fopenmp"] if sys.platform == "linux" else []
    # CUDA's driver is looked for at run time; an older C library has that in a library of its own.
    return compiling + openmp, [*openmp, "-ldl"] if sys.platform == "linux" else []


def found(*patterns: str) -> list[str]:
    """Returns the files under csrc that match, relative and with slashes for setuptools."""
    root = Path(__file__).parent
    files = (file for pattern in patterns for file in root.glob(f"csrc/{pattern}"))
    return sorted(file.relative_to(root).as_posix() for file in files)


def units() -> list[str]:
    """Returns the files to compile, some of which include several of our sources.

    torch's headers take most of the time of a compilation, and two processes use two cores.
    """
    device = found("device_*.cpp", "cuda/bindings.cpp")
    alone = found("cpu/instruction_set.cpp", "cuda/kernels.cpp")
    host = [file for file in found("**/*.cpp") if file not in device + alone]
    folder = Path(__file__).parent / "build" / "units"
    folder.mkdir(parents=True, exist_ok=True)
    for name, sources in (("device", device), ("host", host)):
        unit, text = folder / f"{name}.cpp", "".join(f'#include "../../{s}"\n' for s in sources)
        if not unit.exists() or unit.read_text() != text:
            unit.write_text(text)
    return ["build/units/device.cpp", "build/units/host.cpp", *alone]


def extension(torch: metadata.Distribution) -> dict[str, Any]:
    """Returns the arguments of setup() for a core that is built for the installed torch."""
    # torch looks for ninja on the PATH, which lacks the folder of an inactive virtual environment.
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])

    from setuptools.command.build_py import build_py
    from torch.utils import cpp_extension

    compiling, linking = compile_flags([*cpp_extension.include_paths(), HEADERS])
    core = cpp_extension.CppExtension(
        "ampfast._C",
        units(),
        depends=found("**/*.h", "**/*.cpp"),
        extra_compile_args={"cxx": compiling},
        extra_link_args=linking,
    )

    class BuildExtension(cpp_extension.BuildExtension):
        """torch's build, with one line instead of a traceback where a compiler is unfit."""

        def run(self) -> None:
            require_toolchain()
            with ThreadPoolExecutor(1) as aside:
                kernels = aside.submit(build_kernels)
                super().run()
            say_what_is_left_out(kernels.result())

    class BuildPython(build_py):
        """setuptools' copies of the package, with the kernels among its data."""

        def run(self) -> None:
            build_kernels()
            super().run()

    label, requirement = fits(torch.version)
    return {
        "label": label,
        "install_requires": [requirement],
        "ext_modules": [core],
        "cmdclass": {"build_ext": BuildExtension, "build_py": BuildPython},
    }


def main() -> None:
    """Runs setuptools: for sources, for a wheel of cores that are built, or to build a core."""
    from setuptools import Distribution, setup
    from setuptools.command.egg_info import egg_info

    class BinaryDistribution(Distribution):
        """Distribution whose wheel is for one Python and platform, also without an extension."""

        def has_ext_modules(self) -> bool:
            return True

    # tools/wheels.py puts them there.
    cores = [folder.name for folder in Path(__file__).parent.glob("ampfast/cores/torch*")]
    if "sdist" in sys.argv:
        options = {"install_requires": ["torch>={}.{}".format(*OLDEST_TORCH)]}
    elif cores:
        options = {"install_requires": [served_by(cores)], "distclass": BinaryDistribution}
    else:
        options = extension(installed_torch())
    label = options.pop("label", "")

    class LabelledInfo(egg_info):
        """setuptools' metadata, with the label in the version."""

        def finalize_options(self) -> None:
            # Set here, since the setup.cfg of a source distribution has an empty tag.
            self.tag_build = label
            super().finalize_options()

    options.setdefault("cmdclass", {})["egg_info"] = LabelledInfo
    # setuptools before 77 refuses a plain license name in pyproject.toml.
    setup(license="BSD-3-Clause", **options)


if __name__ == "__main__":
    main()
