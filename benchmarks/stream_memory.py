"""Does a stream of ten times as many prompts need more host memory?

    python benchmarks/stream_memory.py [CONFIG] [--prompts 2000 20000] [--max-in-flight 384] [--no-states] [--out FILE]

Each number of prompts runs in a process and an engine of its own, on random weights (by default of a tiny Llama), with
all tokens' states of three layers: 1.4 GiB for 20,000 prompts and the tiny Llama. Memory is the proportional set size
(PSS, which counts shared pages once) of the process and all its children, sampled ten times a second from the first
sequence on. Exits with 1 if the peaks are further apart than 20%.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

CONFIGS = Path(__file__).parent / "configs"
ALLOWED = 1.2


class PeakMemory(threading.Thread):
    """Samples the memory of this process and its children, in bytes."""

    def __init__(self):
        super().__init__(daemon=True)
        self.peak = 0
        self.ended = threading.Event()

    def run(self) -> None:
        me = psutil.Process()
        while not self.ended.wait(0.1):
            total = 0
            for process in (me, *me.children(recursive=True)):
                try:
                    total += process.memory_full_info().pss
                except psutil.NoSuchProcess:
                    continue
            self.peak = max(self.peak, total)


def run_once(config: Path, num_prompts: int, max_in_flight: int, no_states: bool) -> dict:
    """Stream once in this process."""
    import numpy as np
    import torch
    from vllm import SamplingParams

    from polygraph_hs.engine import CaptureEngine
    from polygraph_hs.spec import CapturePlan

    num_layers = json.loads(config.read_text())["num_hidden_layers"]
    layers = (1, num_layers // 2, num_layers - 1)
    memory = {} if torch.cuda.is_available() else {"kv_cache_memory_bytes": 2**29, "enforce_eager": True}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(config, Path(folder) / "config.json")
        engine = CaptureEngine.start(
            folder,
            layers,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=128,
            max_num_seqs=256,
            **memory,
        )
    rng = np.random.default_rng(0)

    def prompts():
        for _ in range(num_prompts):
            yield rng.integers(3, 1000, size=rng.integers(64, 113)).tolist()

    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    plan = None if no_states else CapturePlan(layers, "all")
    stream = engine.stream(prompts(), sampling, plan, max_in_flight=max_in_flight)
    next(stream)
    memory = PeakMemory()
    memory.start()
    start = time.perf_counter()
    count = 1 + sum(1 for _ in stream)
    seconds = time.perf_counter() - start
    memory.ended.set()
    return {"prompts": count, "seconds": seconds, "peak_mebibytes": memory.peak / 2**20}


def run_apart(options: argparse.Namespace, num_prompts: int) -> dict:
    """Stream in a process of its own, and print what came of it."""
    with tempfile.NamedTemporaryFile() as out:
        command = [sys.executable, __file__, str(options.config), "--prompts", str(num_prompts), "--out", out.name]
        command += ["--max-in-flight", str(options.max_in_flight), *(["--no-states"] if options.no_states else [])]
        subprocess.run(command, check=True, env={"VLLM_LOGGING_LEVEL": "WARNING", **os.environ})
        (result,) = json.loads(Path(out.name).read_text())
    print("{prompts:7d} prompts in {seconds:7.1f} s, peak {peak_mebibytes:8.1f} MiB".format(**result), flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=Path, default=CONFIGS / "tiny.json")
    parser.add_argument("--prompts", type=int, nargs="+", default=[2000, 20000])
    parser.add_argument("--max-in-flight", type=int, default=384)
    parser.add_argument("--no-states", action="store_true", help="capture nothing: what vLLM alone needs")
    parser.add_argument("--out", type=Path, help="also write the results to this JSON file")
    options = parser.parse_args()
    if len(options.prompts) == 1:
        results = [run_once(options.config, options.prompts[0], options.max_in_flight, options.no_states)]
    else:
        results = [run_apart(options, number) for number in options.prompts]
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n")
    if len(results) == 1:
        return 0
    peaks = [result["peak_mebibytes"] for result in results]
    ratio = max(peaks) / min(peaks)
    print(f"the largest peak is {ratio:.3f} times the smallest; allowed {ALLOWED}")
    return int(ratio > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
