"""Wheel with the CUDA kernels and a compiled core for each of several versions of torch; its trial.

    python tools/wheels.py make 2.13.0 2.14.1    # into dist/, with the source distribution
    python tools/wheels.py try 2.13.0 2.14.1     # installs it beside each torch, without a compiler

Without versions, `make` takes those of requirements/torches.txt, `try` the oldest and the newest.
Every torch gets an environment of its own, deleted before the next is made. Cores and kernels are
kept in build/wheels, so that an interrupted run continues with what is missing. The kernels need
nvcc, whose major version should be the oldest that drivers are to be served of.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
WORK = ROOT / "build/wheels"
LOG = WORK / "log"
TOOLS = ("-r", str(ROOT / "requirements/wheels.txt"))
CHECKER = "twine==6.2.0"
KERNELS = "kernels.fatbin"
EMULATOR = ROOT / "tools/ptx_emulator"
# What torch brings.
EXCLUDED = ("libc10*.so", "libgomp.so.1", "libtorch*.so")
# Hides compilers and all other programs.
BARE = {"PATH": "/nowhere", "CC": "false", "CXX": "false"}


def run(*command: str | Path, **options: Any) -> None:
    """Runs a command, with its output in the log; its failure ends this program."""
    with LOG.open("a") as log:
        code = subprocess.call(command, stdout=log, stderr=log, **options)
    if code:
        lines = LOG.read_text(errors="replace").splitlines()[-30:]
        raise SystemExit("\n".join([*lines, f"failed: {' '.join(map(str, command))}; log: {LOG}"]))


def cleared(folder: Path) -> Path:
    """Returns the folder, empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


@contextmanager
def environment(name: str, *requirements: str) -> Iterator[Path]:
    """Makes an environment, gives its interpreter, and deletes it."""
    folder = cleared(WORK / name)
    try:
        run(sys.executable, "-m", "venv", folder)
        python = folder / "bin/python"
        run(python, "-m", "pip", "install", *requirements)
        yield python
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def listed() -> list[str]:
    """Returns the versions in requirements/torches.txt, from the oldest, that this Python has."""
    text = (ROOT / "requirements/torches.txt").read_text()
    lines = re.findall(r'^torch==([\d.]+)(?:; python_version >= "3\.(\d+)")?$', text, re.MULTILINE)
    return [torch for torch, oldest in lines if sys.version_info >= (3, int(oldest or 0))]


def minor(torch: str) -> str:
    """Returns the name of a core's folder, such as "torch2.13"."""
    return "torch{}.{}".format(*torch.split("."))


def unpacked(sources: Path) -> Path:
    """Returns a folder with the content of the source distribution alone."""
    folder = cleared(WORK / "tree")
    shutil.unpack_archive(sources, folder)
    (tree,) = folder.iterdir()
    return tree


def cores_folder(sources: Path) -> Path:
    """Returns where cores are kept, by what they are built from and the Python they are for."""
    tree = unpacked(sources)
    digest = hashlib.sha256()
    for file in sorted([tree / "setup.py", *(tree / "csrc").rglob("*")]):
        if file.is_file():
            digest.update(f"{file.relative_to(tree)}\n".encode() + file.read_bytes())
    return WORK / f"{sysconfig.get_config_var('SOABI')}-{digest.hexdigest()[:12]}"


def build_core(torch: str, sources: Path, kept: Path) -> None:
    """Builds the core for one torch, imports it once, and keeps it."""
    with environment("environment", *TOOLS, f"torch=={torch}") as python:
        tree = unpacked(sources)
        shutil.copyfile(kept.parent / KERNELS, tree / "ampfast" / KERNELS)
        run(python, "setup.py", "--quiet", "build_ext", "--inplace", cwd=tree)
        run(python, "-m", "ampfast", "info", cwd=tree)
        (core,) = tree.glob("ampfast/_C.*.so")
        unfinished = cleared(kept.with_name(f"{kept.name}.part"))
        core.rename(unfinished / core.name)
        unfinished.rename(kept)


def build_kernels(sources: Path, kept: Path) -> None:
    """Compiles the CUDA kernels and keeps them."""
    tree = unpacked(sources)
    # An empty text would be an exit code of 1.
    compiling = "import setup, sys; sys.exit(setup.build_kernels() or None)"
    run(sys.executable, "-c", compiling, cwd=tree)
    shutil.copyfile(tree / "ampfast" / KERNELS, kept.with_suffix(".part"))
    kept.with_suffix(".part").rename(kept)


def require_cores_and_kernels(wheel: Path, count: int) -> None:
    """Exits unless the wheel holds the kernels, and no library besides the cores, as of torch."""
    names = zipfile.ZipFile(wheel).namelist()
    if f"ampfast/{KERNELS}" not in names:
        raise SystemExit(f"{wheel.name} has no ampfast/{KERNELS}")
    libraries = [name for name in names if re.search(r"\.so\b", name)]
    cores = [name for name in libraries if re.match(r"ampfast/cores/torch[\d.]+/_C\.", name)]
    if libraries != cores or len(cores) != count:
        raise SystemExit(f"{wheel.name} should hold {count} cores alone, has {libraries}")


def make(torches: list[str]) -> None:
    """Makes source distribution and wheel."""
    with environment("tools", *TOOLS) as python:
        out = cleared(WORK / "out")
        backend = "from setuptools.build_meta import build_sdist; build_sdist({!r})"
        run(python, "-c", backend.format(str(out)), cwd=ROOT)
        (sources,) = out.glob("*.tar.gz")
        kept = cores_folder(sources)
        kept.mkdir(exist_ok=True)
        if not (kept / KERNELS).exists():
            print("compiling the CUDA kernels", flush=True)
            build_kernels(sources, kept / KERNELS)
        for torch in torches:
            if not (kept / minor(torch)).exists():
                print(f"building the core for torch {torch}", flush=True)
                build_core(torch, sources, kept / minor(torch))
        tree = unpacked(sources)
        for torch in torches:
            shutil.copytree(kept / minor(torch), tree / "ampfast/cores" / minor(torch))
        shutil.copyfile(kept / KERNELS, tree / "ampfast" / KERNELS)
        pip = (python, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps")
        run(*pip, "--wheel-dir", out, tree)
        (plain,) = out.glob("*.whl")
        exclude = [f"--exclude={library}" for library in EXCLUDED]
        environ = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
        tagged = out / "tagged"
        run(python, "-m", "auditwheel", "repair", *exclude, "-w", tagged, plain, env=environ)
        (wheel,) = tagged.glob("*.whl")
        require_cores_and_kernels(wheel, len(torches))
        DIST.mkdir(exist_ok=True)
        # Those that an installer might prefer, such as with a label.
        for old in DIST.glob(f"ampfast-*-{wheel.name.split('-')[2]}-*.whl"):
            old.unlink()
        for file in (sources, wheel):
            print(file.replace(DIST / file.name).relative_to(ROOT))
        shutil.rmtree(out)
        shutil.rmtree(tree.parent)


def try_wheel(torches: list[str]) -> None:
    """Tries the wheel beside each torch alone, with its core and without; checks all metadata."""
    if not list(DIST.glob(f"*-cp{sys.version_info[0]}{sys.version_info[1]}-*.whl")):
        raise SystemExit("dist/ has no wheel for this Python: run `make wheels` first")
    with environment("tools", CHECKER) as python:
        run(python, "-m", "twine", "check", "--strict", *sorted(DIST.glob("ampfast-*")))
        print("ok   twine check")
    command = [sys.executable, "-c", "from ptx_emulator import driver; print(driver.path())"]
    cache = {**os.environ, "PTX_EMULATOR_CACHE": str(WORK)}
    made = subprocess.run(command, cwd=EMULATOR, env=cache, check=True, stdout=subprocess.PIPE)
    driver = made.stdout.decode().strip()
    for torch in torches:
        print(f"trying the wheel with torch {torch}", flush=True)
        with environment("environment", f"torch=={torch}") as python:
            pip = (python, "-I", "-m", "pip", "install", "--no-index", "--only-binary=:all:")
            run(*pip, f"--find-links={DIST}", "ampfast", env=BARE)
            if subprocess.call([python, "-I", ROOT / "tests/smoke.py", driver], env=BARE):
                raise SystemExit(f"the wheel fails with torch {torch}")
            (cores,) = python.parents[1].glob("lib/python*/site-packages/ampfast/cores")
            # Also a wheel of one core then has another.
            (cores / minor(torch)).rename(cores / "torch2.0")
            command = [python, "-I", "-c", "import ampfast"]
            result = subprocess.run(command, env=BARE, capture_output=True, text=True)
            error = result.stderr.strip().rpartition("\n")[2]
            if not error.startswith(f"ImportError: this is torch {torch}"):
                raise SystemExit(f"without a core for torch {torch}, import says: {error!r}")
            print(f"ok   without its core: {error}")


def main() -> None:
    """Reads the command line."""
    commands = {"make": make, "try": try_wheel}
    verb, *torches = sys.argv[1:] or [""]
    if verb not in commands:
        raise SystemExit(__doc__)
    torches = torches or (listed() if verb == "make" else [listed()[0], listed()[-1]])
    if wrong := [torch for torch in torches if not re.fullmatch(r"\d+\.\d+\.\d+(\+\w+)?", torch)]:
        raise SystemExit(f"not a version of torch, such as 2.13.0: {wrong[0]}")
    if len({minor(torch) for torch in torches}) < len(torches):
        raise SystemExit(f"a wheel serves one patch release of a torch: {' '.join(torches)}")
    WORK.mkdir(parents=True, exist_ok=True)
    LOG.unlink(missing_ok=True)
    try:
        commands[verb](torches)
    except KeyboardInterrupt:
        raise SystemExit("interrupted; the cores that are built are kept") from None


if __name__ == "__main__":
    main()
