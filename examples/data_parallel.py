"""Capture with several engines at once, each with its share of the prompts.

    python examples/data_parallel.py MODEL PROMPTS.txt OUT --processes 2 --layers 10 20

One process an engine. On GPUs each gets a GPU of its own, on the CPU a share of the cores. OUT/answers.json and
OUT/states.safetensors hold the results in the order of the prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def places(processes: int) -> list[dict[str, str]]:
    """For each engine, the environment that gives it devices of its own."""
    if torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
        shares = [{"CUDA_VISIBLE_DEVICES": device} for device in devices[:processes]]
    else:
        devices = list(map(str, sorted(os.sched_getaffinity(0))))
        shares = [
            {"VLLM_CPU_OMP_THREADS_BIND": ",".join(devices[rank::processes])}
            for rank in range(min(processes, len(devices)))
        ]
    if len(shares) < processes:
        sys.exit(f"--processes {processes}: there are {len(devices)} devices (GPUs, or else cores), one a process")
    return shares


def run_share(options: argparse.Namespace) -> None:
    """One process: answer every ``processes``-th prompt and save what came of it."""
    from vllm import SamplingParams

    from polygraph_hs import CaptureEngine, CapturePlan

    prompts = options.prompts.read_text().splitlines()
    share = range(options.rank, len(prompts), options.processes)
    engine = CaptureEngine.start(
        options.model,
        options.layers,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        enforce_eager=options.enforce_eager,
    )
    sampling = SamplingParams(temperature=0, max_tokens=options.max_new_tokens)
    plan = CapturePlan(tuple(options.layers), "generated")
    answers, states = [], {}
    for number, (answer,) in zip(share, engine.generate([prompts[i] for i in share], sampling, plan), strict=True):
        answers.append(
            {
                "number": number,
                "prompt": answer.prompt,
                "text": answer.text,
                "token_ids": answer.token_ids,
                "process": options.rank,
            }
        )
        states[str(number)] = answer.hidden_states.values.contiguous()
    (options.out / f"answers-{options.rank}.json").write_text(json.dumps(answers))
    save_file(states, options.out / f"states-{options.rank}.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="path or hub name")
    parser.add_argument("prompts", type=Path, help="a text file with a prompt a line")
    parser.add_argument("out", type=Path, help="folder for the results")
    parser.add_argument("--processes", type=int, default=2, help="how many engines")
    parser.add_argument("--layers", type=int, nargs="+", default=[-1])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, help="by default the model's")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--enforce-eager", action="store_true", help="start faster, generate slower")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_share(options)
        return
    num_prompts = len(options.prompts.read_text().splitlines())
    if not 1 <= options.processes <= num_prompts:
        parser.error(f"--processes {options.processes}: give 1 to {num_prompts}, the number of prompts")
    options.out.mkdir(parents=True, exist_ok=True)
    shares = [
        subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--rank", str(rank)], env={**os.environ, **place})
        for rank, place in enumerate(places(options.processes))
    ]
    failed = [rank for rank, share in enumerate(shares) if share.wait() != 0]
    if failed:
        sys.exit(f"processes {failed} of {options.processes} failed; their messages are above, and nothing was joined")
    answers, states = [], {}
    for rank in range(options.processes):
        answers += json.loads((options.out / f"answers-{rank}.json").read_text())
        states |= load_file(options.out / f"states-{rank}.safetensors")
    answers.sort(key=lambda answer: answer["number"])
    (options.out / "answers.json").write_text(json.dumps(answers, indent=2) + "\n")
    save_file(states, options.out / "states.safetensors")
    for rank in range(options.processes):
        (options.out / f"answers-{rank}.json").unlink()
        (options.out / f"states-{rank}.safetensors").unlink()
    print(f"{len(answers)} answers of {options.processes} engines are in {options.out}")


if __name__ == "__main__":
    main()
