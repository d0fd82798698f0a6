"""What is it worth that requests whose prompts' states are asked for can read the prefix cache?

    python benchmarks/prefix_cache.py [--requests 256] [--prefix 512] [--repeats 5] [--out FILE]

The prompts of a call share a prefix. A cached position is not computed again and leaves no row: either such a request
does not read the cache, or it borrows the rows of the request that computed the block. Measured side by side, in
turns, on random weights of a Llama-3-8B shape (on the CPU: a tiny one), tokens="all", 3 layers:

- plain: vLLM without capture, which reads the cache
- plain, cache skipped: what computing every prefix again costs vLLM alone
- generated: capture of the generated tokens
- all: capture of all tokens, borrowing
- all, cache skipped: the same without borrowing
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import vllm
from transformers import LlamaConfig

from polygraph_hs.engine import CaptureEngine
from polygraph_hs.spec import CapturePlan


def write_config(folder: str, tiny: bool) -> None:
    sizes = (128, 256, 4, 2, 2) if tiny else (4096, 14336, 32, 32, 8)
    hidden_size, intermediate_size, num_layers, num_heads, num_key_value_heads = sizes
    LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        max_position_embeddings=2048,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prefix", type=int, default=512, help="tokens that all prompts share")
    parser.add_argument("--own", type=int, default=64, help="tokens of each prompt's own")
    parser.add_argument("--generate", type=int, default=64, help="generated tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the seconds to this JSON file")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, tiny=not cuda)
        memory = {"gpu_memory_utilization": 0.8} if cuda else {"kv_cache_memory_bytes": 2**30, "enforce_eager": True}
        engine = CaptureEngine.start(
            folder,
            [1, 2, -1],
            dtype="bfloat16",
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=2048,
            max_num_seqs=options.requests,
            **memory,
        )
    rng = np.random.default_rng(0)
    prefix = rng.integers(3, 32000, size=options.prefix).tolist()
    prompts = [prefix + rng.integers(3, 32000, size=options.own).tolist() for _ in range(options.requests)]
    sampling = vllm.SamplingParams(temperature=0, max_tokens=options.generate, ignore_eos=True, detokenize=False)
    skipping = sampling.clone()
    skipping.skip_reading_prefix_cache = True
    plans = {tokens: CapturePlan((1, 2, -1), tokens) for tokens in ("generated", "all")}

    variants = {
        "plain": lambda: engine.generate(prompts, sampling, None),
        "plain, cache skipped": lambda: engine.generate(prompts, skipping, None),
        "generated": lambda: engine.generate(prompts, sampling, plans["generated"]),
        "all": lambda: engine.generate(prompts, sampling, plans["all"]),
        "all, cache skipped": lambda: engine.generate(prompts, skipping, plans["all"]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(options.repeats + 1):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            # The first round warms up.
            if number:
                seconds[name].append(time.perf_counter() - start)
    device = torch.cuda.get_device_name() if cuda else "CPU"
    print(
        f"vLLM {vllm.__version__}, {device}: {options.requests} requests of {options.prefix} shared + {options.own} "
        f"own + {options.generate} generated tokens, 3 layers, hidden size {engine.hidden_size}"
    )
    medians = {name: float(np.median(values)) for name, values in seconds.items()}
    for name, median in medians.items():
        ratio = median / medians["plain"]
        spread = f"({min(seconds[name]):.3f} to {max(seconds[name]):.3f})"
        print(f"{name:22s} median {median:8.3f} s, {ratio:5.2f} times plain {spread}")
    if options.out:
        options.out.write_text(json.dumps(seconds, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
