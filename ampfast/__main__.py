"""Command line: `python -m ampfast info`."""

import argparse
import sys

import ampfast


def main(arguments: list[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: the command line after the program's name; None takes it from ``sys.argv``.

    Returns:
        The exit code; 2 for a command line without a command.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ampfast",
        description="ampfast, a drop-in replacement for torch.amp.GradScaler",
    )
    parser.add_argument("--version", action="version", version=f"ampfast {ampfast.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    command = commands.add_parser(
        "info",
        help="versions, devices and available backends",
        description="Prints versions, devices, each backend with the reason where it cannot run, "
        "and which backend the gradients of each device get.",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.command == "info":
        from ampfast import info

        return info.run(as_json=options.json)
    parser.print_help()
    return 2


if __name__ == "__main__":
    sys.exit(main())
