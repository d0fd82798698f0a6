"""What do hidden states cost beside vLLM's generation without them?

    python benchmarks/overhead.py [CONFIG] [--requests 256 --prompt 128 --generate 128] [--groups ...] [--out FILE]

CONFIG is a config.json, by default a Llama-3-8B shape on CUDA and a tiny Llama on the CPU; weights are random. Time is
that of one call, from prompts to the states in the caller's hands. Every variant is timed in turns with plain vLLM, an
engine of its own that stays in memory: plain, variant, plain, variant, ... The ratio is that of the medians of these
two. A call's states are let go before the next call, but for the variant that says otherwise. Then, untimed, the
states of each of this project's variants are compared with those of a slow, plain path in the same steps
(baselines.py): bit for bit, means within 1e-5.

Groups:
- 3-layers, 1-layer, all-layers: this project, each token selection and pooling, and a batch that asks for nothing
- eager: plain vLLM without CUDA graphs, and eager hooks that keep slices and send float32 pickles
- extract: vLLM's own extract_hidden_states, all tokens
- lens: vllm-lens, all tokens, where it is installed
- second-pass: plain vLLM, then a Hugging Face forward pass over prompt and generation, all tokens
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import baselines
import numpy as np
import torch
import vllm

from polygraph_hs.engine import CaptureEngine
from polygraph_hs.spec import CapturePlan

CONFIGS = Path(__file__).parent / "configs"
# By name, tokens and pooling.
SELECTIONS = {
    "last_prompt": ("last_prompt", "none"),
    "generated": ("generated", "none"),
    "generated, mean": ("generated", "mean"),
    "generated, last": ("generated", "last"),
    "prompt": ("prompt", "none"),
    "prompt, mean": ("prompt", "mean"),
    "all": ("all", "none"),
    "all, mean": ("all", "mean"),
}
GROUPS = ("3-layers", "1-layer", "all-layers", "eager", "extract", "lens", "second-pass")
LARGEST_MEAN_ERROR = 1e-5


@dataclass
class Result:
    """One line of the table; seconds and those of plain vLLM in the same group, and what came of the check."""

    group: str
    variant: str
    seconds: list[float]
    plain: list[float]
    mebibytes: float
    check: str = ""

    @property
    def ratio(self) -> float:
        return float(np.median(self.seconds) / np.median(self.plain))

    def __str__(self) -> str:
        low, high = min(self.seconds), max(self.seconds)
        return (
            f"{self.group:11s} {self.variant:34s} {np.median(self.seconds):8.3f} s  {self.ratio:6.3f}  "
            f"({low:.3f} to {high:.3f}; plain {np.median(self.plain):.3f})  {self.mebibytes:8.0f} MiB"
        )


class Overhead:
    """Engines of one model's shape, and the variants timed on them."""

    def __init__(self, options: argparse.Namespace, folder: str):
        self.options = options
        self.folder = folder
        self.cuda = torch.cuda.is_available()
        config = json.loads((Path(folder) / "config.json").read_text())
        self.num_layers, self.hidden_size = config["num_hidden_layers"], config["hidden_size"]
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or self.hidden_size // heads
        kv_width = 2 * self.num_layers * config.get("num_key_value_heads", heads) * head_dim
        self.num_tokens = options.prompt + options.generate
        self.kv_bytes = int(1.3 * 2 * kv_width * options.requests * (self.num_tokens + 16)) + 2**28
        rng = np.random.default_rng(0)
        vocabulary = config["vocab_size"]
        self.prompts = [rng.integers(3, vocabulary, size=options.prompt).tolist() for _ in range(options.requests)]
        self.inputs = [{"prompt_token_ids": prompt} for prompt in self.prompts]
        self.sampling = vllm.SamplingParams(
            temperature=0, max_tokens=options.generate, ignore_eos=True, detokenize=False
        )
        self.results: list[Result] = []
        self.plain_engine = self.llm()

    def engine_options(self, **changes) -> dict:
        options = {
            "dtype": self.options.dtype,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": self.num_tokens + 16,
            "max_num_seqs": self.options.requests,
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": self.kv_bytes,
            "enforce_eager": self.options.enforce_eager,
        }
        if self.cuda:
            options["gpu_memory_utilization"] = 0.3
        return {**options, **changes}

    def llm(self, **changes) -> vllm.LLM:
        return vllm.LLM(self.folder, **self.engine_options(**changes))

    def plain(self, llm: vllm.LLM | None = None) -> list:
        return (llm or self.plain_engine).generate(self.inputs, self.sampling, use_tqdm=False)

    def time(self, group: str, variant: str, run: Callable[[], object], mebibytes: float = 0.0) -> Result:
        """Time a variant in turns with plain vLLM."""
        seconds: dict[Callable, list[float]] = {self.plain: [], run: []}
        for number in range(self.options.repeats + 1):
            for call, into in seconds.items():
                start = time.perf_counter()
                states = call()
                elapsed = time.perf_counter() - start
                del states
                # The first round warms up.
                if number:
                    into.append(elapsed)
        result = Result(group, variant, seconds[run], seconds[self.plain], mebibytes)
        self.results.append(result)
        print(result, flush=True)
        return result

    def capture(self, group: str, layers: list[int]) -> None:
        """This project's variants on an engine that taps these layers."""
        engine = CaptureEngine.start(
            self.folder, layers, worker_extension_cls="baselines.SlowPath", **self.engine_options()
        )
        for name in self.options.selections:
            tokens, pooling = SELECTIONS[name]
            size = self.mebibytes(len(layers), tokens, pooling)
            if size > self.options.most_mebibytes:
                print(f"{group:11s} {name:34s} left out: {size:.0f} MiB are more than --most-mebibytes")
                continue
            plan = CapturePlan(tuple(layers), tokens, pooling)
            result = self.time(group, name, lambda plan=plan: self.states(engine, plan), size)
            result.check = self.check(engine, plan)
            print(f"{group:11s} {name:34s} {result.check}", flush=True)
        self.time(group, "nothing asked for", lambda: self.states(engine, None))
        size = self.mebibytes(len(layers), "generated", "none")
        if size * (self.options.repeats + 1) <= self.options.most_mebibytes:
            # No memory is used twice: each page of it is new.
            kept, plan = [], CapturePlan(tuple(layers), "generated")
            self.time(group, "generated, no states let go", lambda: kept.append(self.states(engine, plan)), size)
        self.stop(engine.llm)

    def states(self, engine: CaptureEngine, plan: CapturePlan | None) -> list:
        return [answers[0].hidden_states for answers in engine.generate(self.prompts, self.sampling, plan)]

    def mebibytes(self, num_layers: int, tokens: str, pooling: str) -> float:
        """Size of the states that reach the caller in one call."""
        counts = {
            "last_prompt": 1,
            "generated": self.options.generate,
            "prompt": self.options.prompt,
            "all": self.num_tokens - 1,
        }
        rows = self.options.requests * (counts[tokens] if pooling == "none" else 1)
        itemsize = 4 if pooling == "mean" else getattr(torch, self.options.dtype).itemsize
        return rows * num_layers * self.hidden_size * itemsize / 2**20

    def check(self, engine: CaptureEngine, plan: CapturePlan) -> str:
        """Compare one more call's states with those of the slow path in the same steps."""
        engine.llm.collective_rpc("slow_path_start")
        states = self.states(engine, plan)
        arguments = (plan.tokens, plan.pooling, self.options.prompt, self.options.generate)
        (expected,) = engine.llm.collective_rpc("slow_path_take", args=arguments)
        if len(expected) != len(states):
            raise RuntimeError(f"the slow path saw {len(expected)} requests, there were {len(states)}")
        if plan.pooling != "mean":
            wrong = sum(
                baselines.digest(state.values) != digest for state, digest in zip(states, expected, strict=True)
            )
            return "bit for bit" if not wrong else f"WRONG: {wrong} of {len(states)} differ"
        values = np.stack([state.values[:, 0].double().numpy() for state in states])
        exact = np.stack([np.frombuffer(means).reshape(values.shape[1:]) for means in expected])
        error = (np.linalg.norm(values - exact, axis=-1) / np.linalg.norm(exact, axis=-1)).max()
        return f"{'' if error <= LARGEST_MEAN_ERROR else 'WRONG: '}relative error {error:.1e}"

    def eager(self, group: str) -> None:
        layers = self.three_layers()
        with mock.patch.dict(os.environ, VLLM_USE_V2_MODEL_RUNNER="0"):
            llm = self.llm(enforce_eager=True, worker_extension_cls="baselines.EagerHooks")
        self.time(group, "plain vLLM, enforce_eager", lambda: self.plain(llm))
        llm.collective_rpc("hooks_install", args=(layers,))

        def hooked():
            self.plain(llm)
            return [pickle.loads(reply) for reply in llm.collective_rpc("hooks_take")]

        self.time(group, "eager hooks, all, float32 pickles", hooked, self.mebibytes(3, "all", "none") * 2)
        self.stop(llm)

    def extract(self, group: str) -> None:
        layers = self.three_layers()
        with baselines.extraction_folder() as folder:
            memory = {"kv_cache_memory_bytes": 3 * self.kv_bytes}
            llm = self.llm(**baselines.extraction_options(layers, folder), **memory)
            self.time(
                group,
                "extract_hidden_states, all",
                lambda: baselines.extract(llm, self.inputs, self.sampling),
                self.mebibytes(3, "all", "none"),
            )
            self.stop(llm)

    def lens(self, group: str) -> None:
        if importlib.util.find_spec("vllm_lens") is None:
            print(f"{group:11s} left out: vllm-lens is not installed")
            return
        layers = self.three_layers()
        with mock.patch.dict(os.environ, VLLM_PLUGINS="activations", VLLM_USE_V2_MODEL_RUNNER="0"):
            from vllm_lens._activations_plugin import register

            register()
            llm = self.llm(enforce_eager=True)
        self.time(
            group,
            "vllm-lens, all",
            lambda: baselines.lens(llm, self.inputs, self.sampling, layers),
            self.mebibytes(3, "all", "none"),
        )
        self.stop(llm)

    def second_pass(self, group: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        layers = self.three_layers()
        device = "cuda" if self.cuda else "cpu"
        config = AutoConfig.from_pretrained(self.folder)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, self.options.dtype)).eval()

        def both():
            outputs = self.plain()
            sequences = [[*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]] for output in outputs]
            return baselines.second_pass(model, sequences, layers, batch_size=32)

        self.time(group, "generation, then Hugging Face, all", both, self.mebibytes(3, "all", "none"))

    def three_layers(self) -> list[int]:
        """In the middle, three quarters up, and the last block's output (all engines can give these)."""
        return [self.num_layers // 2, 3 * self.num_layers // 4, self.num_layers - 1]

    def run(self, group: str) -> None:
        layers = {
            "1-layer": self.three_layers()[1:2],
            "3-layers": self.three_layers(),
            "all-layers": list(range(1, self.num_layers + 1)),
        }
        if group in layers:
            self.capture(group, layers[group])
        else:
            getattr(self, group.replace("-", "_"))(group)
        gc.collect()

    @staticmethod
    def stop(llm: vllm.LLM) -> None:
        llm.llm_engine.engine_core.shutdown()


def main() -> int:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=Path, default=CONFIGS / ("llama-3-8b.json" if cuda else "tiny.json"))
    parser.add_argument("--requests", type=int, default=256 if cuda else 32)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--generate", type=int, default=128, help="generated tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--enforce-eager", action="store_true", help="every engine without compilation and graphs")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    names = list(SELECTIONS)
    parser.add_argument("--selections", nargs="+", choices=names, default=names, help="of this project's variants")
    parser.add_argument("--most-mebibytes", type=float, default=20_000, help="leave out variants with more states")
    parser.add_argument("--out", type=Path, help="also write the results to this JSON file")
    options = parser.parse_args()
    # Other projects' plugins are for their own group alone.
    os.environ.setdefault("VLLM_PLUGINS", "")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(options.config, Path(folder) / "config.json")
        bench = Overhead(options, folder)
        device = torch.cuda.get_device_name() if cuda else f"CPU, {os.cpu_count()} cores"
        print(
            f"vLLM {vllm.__version__}, torch {torch.__version__}, {device}; {options.config.stem}, {options.dtype}, "
            f"{'eager' if options.enforce_eager else 'compiled'}; {options.requests} requests of {options.prompt} + "
            f"{options.generate} tokens; medians of {options.repeats}\n"
            f"{'group':11s} {'variant':34s} {'median':>10s}   ratio",
            flush=True,
        )
        for group in options.groups:
            bench.run(group)
        bench.stop(bench.plain_engine)
    if options.out:
        results = [{**asdict(result), "ratio": result.ratio} for result in bench.results]
        options.out.write_text(json.dumps({"options": vars(options), "results": results}, indent=2, default=str) + "\n")
    return int(any(result.check.startswith("WRONG") for result in bench.results))


if __name__ == "__main__":
    sys.exit(main())
