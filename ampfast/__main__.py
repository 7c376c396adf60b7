"""Command line: `python -m ampfast info | check | run | compare`."""

import argparse
import importlib
import sys

import ampfast
from ampfast.errors import float_of


def main(arguments: list[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: the command line after the program's name; None takes it from ``sys.argv``.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ampfast",
        description="ampfast, a drop-in replacement for torch.amp.GradScaler",
    )
    parser.add_argument("--version", action="version", version=f"ampfast {ampfast.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, devices, backends, why one cannot run, as JSON")
    commands.add_parser("check", help="is all equal to torch's here? Exit code 1 if not")

    run = commands.add_parser(
        "run",
        help="your training script with ampfast's scaler in place of torch's",
        description="Runs a script as python does, unedited, with ampfast's GradScaler wherever "
        "it makes torch's. At the end a line tells the steps, the skipped ones, the final scale, "
        "the scaler's own time and its share of a step. For several ranks torchrun starts it, and "
        "rank 0 prints the line: torchrun --nproc_per_node 2 -m ampfast run SCRIPT ARGS...",
    )
    run.add_argument(
        "--guard",
        action="store_true",
        help="for bfloat16 and float32: skip the steps of torch's optimizers with inf, NaN or a "
        "spike; a scaler of the program decides instead, if it has one",
    )
    run.add_argument(
        "--clip",
        action="store_true",
        help="replace torch.nn.utils.clip_grad_norm_, too: faster, and rounded differently",
    )
    run.add_argument("--track", choices=("overflow",), help="tell which parameters overflow")
    run.add_argument(
        "--skip-above",
        type=_skip_limit,
        metavar="LIMIT",
        help="skip steps with a larger gradient norm: a number such as 20, or sigmas:6, which is 6 "
        "standard deviations above the mean of the last 128 norms; sigmas:6:64 of the last 64",
    )
    run.add_argument(
        "--max-skips", type=_positive, metavar="N", help="end after N steps skipped in a row"
    )
    run.add_argument("--record", help=argparse.SUPPRESS)
    run.add_argument("--stop", type=int, help=argparse.SUPPRESS)
    run.add_argument("--keep-torch", action="store_true", help=argparse.SUPPRESS)

    compare = commands.add_parser(
        "compare",
        help="your training script with torch's scaler and with ampfast's, side by side",
        description="Runs a script three times, unedited: with torch's scaler, with ampfast's, and "
        "with torch's again, which tells whether the script repeats itself. Prints the times of "
        "the scalers, and whether losses, scales, skipped steps and the final weights are equal "
        "bit for bit. The runs share the folder: a script that resumes from its checkpoints does "
        "not repeat itself. Compares one process: it refuses to be started by torchrun.",
        epilog="Exit code: 0 if equal, or if the script does not repeat itself; 1 if different; 2 "
        "if there was nothing to compare.",
    )
    compare.add_argument(
        "--steps", type=_positive, metavar="N", help="end each run after N updates of the scale"
    )
    for command in (run, compare):
        command.add_argument(
            "-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module"
        )
        # They are one argument, since argparse would drop a -- after SCRIPT.
        command.add_argument(
            "program",
            metavar="SCRIPT",
            nargs=argparse.PARSER,
            help="path of your script, and its own arguments",
        )

    options = parser.parse_args(arguments)
    if options.command in ("run", "compare"):
        given = options.program
        options.program, *options.arguments = given[given[0] == "--" :]
    named = vars(options)
    code: int = importlib.import_module(f"ampfast.cli.{named.pop('command')}").run(**named)
    return code


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return int(text)


def _skip_limit(text: str) -> float | ampfast.Sigmas:
    name, *numbers = text.split(":")
    try:
        if name == "sigmas" and len(numbers) in (1, 2):
            return ampfast.Sigmas(float(numbers[0]), *map(int, numbers[1:]))
        return float_of("skip_above", float(text), least=0)
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(
            f"must be a norm such as 20, or sigmas:6 or sigmas:6:64, got {text} ({error})"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
