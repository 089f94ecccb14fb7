"""The `defib` command: reads the command line and hands over. Imports of each command are its own, to start fast."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from defib import __version__
from defib.cli.exits import Exit, Stop

EXAMPLE = "defib run -- vllm serve Qwen/Qwen2.5-7B-Instruct --port 8000"
INTERRUPTED = 130
EPILOG = "Exit codes and everything else an operator needs: docs/operating.md."


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the console script. Returns the exit code; `run` becomes the launcher and doesn't return."""
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    own, command = given[:split], given[split + 1 :]
    try:
        if own[:1] == ["run"] and not command:
            _refuse_without_command(own)
        return _dispatch(parser().parse_args(own), command)
    except Stop as stop:
        print(f"defib: {stop.message}", file=sys.stderr)
        return int(stop.code)
    except KeyboardInterrupt:
        return INTERRUPTED


def _refuse_without_command(own: Sequence[str]) -> None:
    """`defib run vllm serve m` and `defib run`: what to write instead. Raises Stop (2)."""
    options, rest = parser().parse_known_args(own)
    before = [*options.stray, *rest]
    if before:
        first = own.index(before[0])
        raise Stop(
            Exit.USAGE,
            "no command after `--`; put `--` before your command: "
            f"defib {' '.join(own[:first])} -- {' '.join(own[first:])}",
        )
    raise Stop(Exit.USAGE, f"no command after `--`; for example: {EXAMPLE}")


def _dispatch(options: argparse.Namespace, command: Sequence[str]) -> int:
    match options.verb:
        case "run":
            from defib.cli.run import run

            if options.stray:
                raise Stop(Exit.USAGE, f"{options.stray[0]!r} before `--` is no option of `defib run`")
            return run(options, command)
        case "demo":
            from defib.cli.demo import demo

            return demo(options)
        case "status":
            from defib.cli.status import status

            return status(options)
        case _:
            from defib.cli.status import order

            return order(options)


def parser() -> argparse.ArgumentParser:
    """Every command and option of `defib`."""
    root = argparse.ArgumentParser(
        prog="defib",
        description="Stands beside an LLM inference server and brings it back.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    root.add_argument("--version", action="version", version=f"defib {__version__}")
    verbs = root.add_subparsers(dest="verb", metavar="COMMAND", required=True)
    _add_run(verbs)
    for name, text in (
        ("status", "show the instances that run here"),
        ("pause", "keep defib's hands off an instance"),
        ("resume", "give an instance back to defib, also after a spent budget"),
    ):
        verb = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
        verb.add_argument("--name", metavar="N", help="the instance; may be left out where only one runs")
        verb.add_argument("--runtime-dir", metavar="D", help="its runtime folder, if `run` was given one")
        if name == "status":
            verb.add_argument("--json", action="store_true", help="print the snapshot as JSON")
    demo = verbs.add_parser("demo", help="show a recovery on an embedded engine, no GPU needed", allow_abbrev=False)
    demo.add_argument("--keep", action="store_true", help="keep the demo's folder, with the evidence")
    return root


def _add_run(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = verbs.add_parser(
        "run",
        help="run a server under defib",
        usage="defib run [options] -- COMMAND...",
        description="Runs COMMAND, an inference server, and brings it back when it breaks.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    run.add_argument("--observe", action="store_true", help="detect and report only, touch nothing")
    run.add_argument("--name", metavar="N", help="name of the instance (default: from the listen address)")
    run.add_argument("--listen", metavar="A", help="where clients come to: HOST:PORT or PORT")
    run.add_argument("--upstream", metavar="B", help="where the worker serves, if its command can't be edited")
    run.add_argument("--no-gateway", action="store_true", help="leave the traffic alone: nothing is held or replayed")
    run.add_argument("--engine", metavar="E", help="the engine's profile (default: recognised by the command)")
    run.add_argument("--set", metavar="NAME=VALUE", action="append", help="a setting; may be given several times")
    run.add_argument("--state-dir", metavar="D", help="folder of evidence and memory")
    run.add_argument("--runtime-dir", metavar="D", help="folder of the sockets")
    run.add_argument("--policies", metavar="DIR", help="folder of engine profiles, signatures and ladders")
    run.add_argument("stray", nargs="*", help=argparse.SUPPRESS)


if __name__ == "__main__":
    sys.exit(main())


if __name__ == "__main__":
    sys.exit(main())
