"""Compiled cores of a wheel for several versions of torch, each in a folder of its own."""

from pathlib import Path


def folders_for(torch_version: str, cores: Path = Path(__file__).parent) -> list[str]:
    """Folders that may hold the core for a version of torch, besides the package's own.

    torch keeps its binary interface within a minor version, so the patch number does not count.

    Args:
        torch_version: As ``torch.__version__``.
        cores: Folder with ``torch2.13/_C*.so`` and so on.

    Returns:
        One folder; none in a build for a single torch, whose core is in the package itself.

    Raises:
        ImportError: If there are cores, and none of them is for this torch.
    """
    folder = cores / "torch{}.{}".format(*torch_version.split(".")[:2])
    if folder.is_dir():
        return [str(folder)]
    served = [path.name.removeprefix("torch").split(".") for path in cores.glob("torch*")]
    if not served:
        return []
    listed = ", ".join(".".join(minor) for minor in sorted(served, key=lambda v: [*map(int, v)]))
    raise ImportError(
        f"this is torch {torch_version}, and this wheel of ampfast has compiled cores for torch "
        f"{listed}; install another version of torch or of ampfast, or build ampfast for this "
        "torch: `pip install --no-build-isolation .` in a checkout"
    )
