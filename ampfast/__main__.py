"""Command line: `python -m ampfast info` and `python -m ampfast demo`."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import ampfast


def main(arguments: list[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: the command line after the program's name; None takes it from ``sys.argv``.

    Returns:
        The exit code; 2 for a command line without a command.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "info":
        from ampfast import info

        return info.run(as_json=options.json)
    if options.command == "demo":
        from ampfast import demo

        return demo.run(options.steps, options.device, options.seed, options.output)
    parser.print_help()
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ampfast",
        description="ampfast, a drop-in replacement for torch.amp.GradScaler",
    )
    parser.add_argument("--version", action="version", version=f"ampfast {ampfast.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    info = commands.add_parser(
        "info",
        help="versions, devices and available backends",
        description="Prints versions, devices, each backend with the reason where it cannot run, "
        "and which backend the gradients of each device get.",
    )
    info.add_argument("--json", action="store_true", help="print one JSON object")

    demo = commands.add_parser(
        "demo",
        help="train with torch's scaler and with ampfast's, and compare bit for bit",
        description="Trains the same small network on handwritten digits with torch's scaler and "
        "with ampfast's, compares the runs bit for bit, and draws them. Needs scikit-learn, "
        "matplotlib and tqdm. Exit code: 0 if the runs are equal, 1 if they differ, 2 if the demo "
        "cannot be run.",
    )
    default = "(default: %(default)s)"
    demo.add_argument(
        "--steps", type=_integer_from(1), default=300, help=f"training steps of each run {default}"
    )
    demo.add_argument("--device", help="torch device (default: cuda where there is one, else cpu)")
    seeded = f"seed of initial parameters, data split and batches {default}"
    demo.add_argument("--seed", type=_integer_from(0), default=0, help=seeded)
    path = Path("ampfast-demo.png")
    demo.add_argument(
        "--output", type=Path, default=path, metavar="PATH", help=f"path of the picture {default}"
    )
    return parser


def _integer_from(minimum: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        # torch takes seeds of 64 bits.
        if not minimum <= value < 2**63:
            raise argparse.ArgumentTypeError(f"must be from {minimum} to 2**63 - 1, not {value}")
        return value

    return integer


if __name__ == "__main__":
    sys.exit(main())
