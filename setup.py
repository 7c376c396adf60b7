"""Builds the extension `ampfast._C`; other metadata is in pyproject.toml."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

OLDEST_TORCH = (2, 11)
# Default architectures of the CUDA kernels, unless TORCH_CUDA_ARCH_LIST is set; those that nvcc
# does not support are left out.
CUDA_ARCHITECTURES = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "11.0", "12.0")
# nvcc threads per file: one for each architecture.
MOST_NVCC_THREADS = 8
# The default scheme of Debian's and Ubuntu's Python 3.10 names a folder under /usr/local.
HEADERS = sysconfig.get_path("include", "posix_prefix")
# Settings besides the sources that change the build.
BUILD_VARIABLES = (
    *("AMPFAST_CUDA", "CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST"),
    *("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS"),
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


def wants_cuda(
    override: str | None, sources: list[str], torch_cuda: str | None, nvcc: str | None
) -> bool:
    """Decides whether to build the CUDA kernels, without looking for a GPU; says why not.

    Args:
        override: Value of AMPFAST_CUDA: "0" never, "1" always, None or "" if possible.
        sources: The CUDA sources of this version.
        torch_cuda: The CUDA version that torch is built with, or None.
        nvcc: The path of the CUDA compiler, or None.

    Raises:
        SystemExit: If `override` is "1" and cannot be followed, or is something else.
    """
    if override not in (None, "", "0", "1"):
        raise SystemExit(f"AMPFAST_CUDA must be 0 or 1 or not set, got {override!r}")
    if override == "0":
        return False
    if not sources:
        why_not = "this version of ampfast has no CUDA sources"
    elif torch_cuda is None:
        why_not = "the installed torch is built without CUDA"
    elif nvcc is None:
        why_not = "nvcc was not found: set CUDA_HOME or put it on the PATH"
    elif not (why_not := mismatch(nvcc, torch_cuda)):
        return True
    if override == "1":
        raise SystemExit(f"AMPFAST_CUDA=1, but {why_not}")
    if torch_cuda is not None:
        say_what_is_left_out(why_not)
    return False


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command; one that does not start, as of another processor, fails like any other."""
    try:
        return subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def mismatch(nvcc: str, torch_cuda: str) -> str:
    """Returns why `nvcc` cannot build for a torch of that CUDA version; empty if it can."""
    release = re.search(r"release (\d+)(\.\d+)", run([nvcc, "--version"]).stdout)
    # torch's build refuses another major version.
    if release and release[1] != torch_cuda.split(".")[0]:
        return f"nvcc is of CUDA {release[1]}{release[2]}, torch of {torch_cuda}"
    # An empty file includes nvcc's own headers, which refuse compilers that they do not know; torch
    # hands over $CC, too.
    host = ["-ccbin", os.environ["CC"]] if os.environ.get("CC") else []
    tried = run([nvcc, *host, "-E", "-x", "cu", os.devnull, "-o", os.devnull])
    if tried.returncode == 0:
        return ""
    lines = tried.stderr.splitlines() or [f"exit code {tried.returncode}"]
    errors = [line for line in lines if re.search("error|fatal", line)]
    return f"nvcc does not compile here: {(errors or lines)[0].strip()}"


def say_what_is_left_out(why: str) -> None:
    """Prints one line about a build that goes on without CUDA kernels; the Makefile shows it."""
    print(
        f"ampfast is built without CUDA kernels, as {why}. Nothing is lost: Triton's kernels serve "
        "GPUs. AMPFAST_CUDA=1 makes this an error.",
        file=sys.stderr,
    )


def find_nvcc() -> str | None:
    """Returns the path of nvcc inside its toolkit; the one on the PATH may be a wrapper script."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if not home and (on_path := shutil.which("nvcc")):
        dry_run = [on_path, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
        top = re.search(r"^#\$ TOP=(.+)$", run(dry_run).stderr, re.MULTILINE)
        home = top[1].strip() if top else os.path.join(os.path.dirname(on_path), os.pardir)
    home = os.path.realpath(home or "/usr/local/cuda")
    return shutil.which("nvcc", path=os.path.join(home, "bin"))


def cuda_architectures(nvcc: str) -> str:
    """Returns a TORCH_CUDA_ARCH_LIST of what `nvcc` supports, with PTX for newer architectures."""
    known = run([nvcc, "--list-gpu-code"]).stdout.split()
    chosen = [arch for arch in CUDA_ARCHITECTURES if "sm_" + arch.replace(".", "") in known]
    return ";".join(chosen) + "+PTX"


def compile_flags(include_dirs: list[str]) -> tuple[list[str], list[str]]:
    """Returns the C++ compiler's and the linker's flags; the C++ standard is left to torch."""
    if sys.platform == "win32":
        return ["/O2", "/fp:strict", "/openmp"], []
    # Results must equal torch's bit for bit: no fast-math, no fused multiply-add; and one binary
    # must run everywhere: no -march=native.
    compiling = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-g0"]
    compiling += ["-Wall", "-Wextra"]
    # As system folders, too, so that only warnings of our own sources show.
    for folder in include_dirs:
        compiling += ["-isystem", folder]
    # at::parallel_for is a header that is serial without OpenMP. libgomp resolves to torch's own
    # copy, which is loaded first and has the same name.
    openmp = ["-fopenmp"] if sys.platform == "linux" else []
    return compiling + openmp, openmp


def nvcc_flags() -> list[str]:
    """Returns the CUDA compiler's flags; architectures are compiled in parallel."""
    threads = min(os.cpu_count() or 1, MOST_NVCC_THREADS)
    return ["-O3", "--fmad=false", "--threads", str(threads)]


def found(*patterns: str) -> list[str]:
    """Returns the files under csrc that match, relative and with slashes for setuptools."""
    root = Path(__file__).parent
    files = (file for pattern in patterns for file in root.glob(f"csrc/{pattern}"))
    return sorted(file.relative_to(root).as_posix() for file in files)


def extension(torch: metadata.Distribution) -> dict[str, Any]:
    """Returns the arguments of setup() for a core that is built for the installed torch."""
    # torch looks for ninja on the PATH, which lacks the folder of an inactive virtual environment.
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])

    from torch.version import cuda as torch_cuda

    cuda_sources = found("cuda/*.cu")
    nvcc = find_nvcc() if cuda_sources and torch_cuda else None
    override = os.environ.get("AMPFAST_CUDA")
    with_cuda = wants_cuda(override, cuda_sources, torch_cuda, nvcc)
    if with_cuda and nvcc:
        # torch reads the first at import; without the second it would query this machine's GPU.
        os.environ["CUDA_HOME"] = str(Path(nvcc).parent.parent)
        if "TORCH_CUDA_ARCH_LIST" not in os.environ:
            os.environ["TORCH_CUDA_ARCH_LIST"] = cuda_architectures(nvcc)

    from torch.utils import cpp_extension

    compiling, linking = compile_flags([*cpp_extension.include_paths(), HEADERS])

    def core(with_cuda: bool) -> Any:
        kind = cpp_extension.CUDAExtension if with_cuda else cpp_extension.CppExtension
        return kind(
            "ampfast._C",
            found("*.cpp", "cpu/*.cpp", *(["cuda/*.cpp", "cuda/*.cu"] if with_cuda else [])),
            depends=found("**/*.h", "**/*.cuh"),
            define_macros=[("AMPFAST_WITH_CUDA", "1")] if with_cuda else [],
            extra_compile_args={"cxx": compiling, "nvcc": nvcc_flags()},
            extra_link_args=linking,
        )

    class BuildExtension(cpp_extension.BuildExtension):
        """torch's build, with one line instead of a traceback where a compiler is unfit."""

        def run(self) -> None:
            require_toolchain()
            super().run()

        def build_extensions(self) -> None:
            try:
                super().build_extensions()
            except Exception as error:  # of torch's checks, ninja or setuptools
                if not with_cuda or override == "1":
                    raise
                say_what_is_left_out(f"they do not compile ({' '.join(str(error).split())[:200]})")
                vars(self.extensions[0]).update(vars(core(with_cuda=False)))
                super().build_extensions()

    label, requirement = fits(torch.version)
    return {
        "label": label,
        "install_requires": [requirement],
        "ext_modules": [core(with_cuda)],
        "cmdclass": {"build_ext": BuildExtension},
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
