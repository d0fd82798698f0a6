"""The ``polygraph-hs`` command."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="polygraph-hs",
        description="Uncertainty estimation from hidden states captured in vLLM's generation pass.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="answer real questions, fit estimators, see which tell wrong answers",
        description="Answer the world-facts questions on vLLM, fit estimators on the train split's hidden states, and "
        "score the test split through lm-polygraph's UEManager, all from one generation pass a question.",
        epilog="example: polygraph-hs demo --model meta-llama/Llama-3.1-8B-Instruct --layer 20",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--model", help="path or hub name; SmolLM2-135M-Instruct from its Python package if not given")
    demo.add_argument("--layer", type=int, help="layer to read; two thirds of the model's depth if not given")
    demo.add_argument("--max-new-tokens", type=int, default=24, help="most tokens of an answer")
    demo.add_argument("--dtype", default="bfloat16", help="the model's dtype")
    demo.add_argument("--limit", type=int, help="use only the first questions of each topic and split")
    demo.add_argument(
        "--compile", action="store_true", help="compile the model on the CPU too (two minutes more to start)"
    )
    demo.add_argument("--output", type=Path, default=Path("out/demo"), help="folder for the results")
    demo.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run a command; errors a user can mend are printed without a traceback."""
    options = _parser().parse_args(arguments)
    # The results are what the command prints; vLLM's start-up log, hundreds of lines, only if it is asked for.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from polygraph_hs.demo import run_demo

    try:
        run_demo(
            model=options.model,
            layer=options.layer,
            max_new_tokens=options.max_new_tokens,
            dtype=options.dtype,
            limit=options.limit,
            compile_on_cpu=options.compile,
            output=options.output,
            verbose=not options.quiet,
        )
    except (ValueError, FileNotFoundError, ImportError) as error:
        print(f"polygraph-hs {options.command}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
