"""Are states right under everything that vLLM's scheduler does on a GPU?

    python benchmarks/gpu_scheduling.py [--runner V1|V2] [--drafts ngram ngram_gpu] [--out FILE]

The counterpart of tests/test_scheduling.py where there is CUDA: compiled, with CUDA graphs and asynchronous scheduling,
which vLLM's CPU build does not have. A random Llama in bfloat16 runs through chunked prefill, prefix caching, several
plans in a batch, samples, stop tokens under asynchronous scheduling, preemption and speculative decoding. Every
row of every layer is compared with Hugging Face in float32 on the same weights and tokens; bfloat16 alone is about
0.01 away, another token's row about 1. Exits with 1 if a row is further than 0.05, or if a situation did not occur.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import vllm
from gpu_accuracy import VOCABULARY, write_random_llama
from transformers import AutoModelForCausalLM

from polygraph_hs.engine import CaptureEngine
from polygraph_hs.spec import CapturePlan, token_span

ALLOWED_ERROR = 0.05
NUM_LAYERS = 6
LAYERS = (0, 3, NUM_LAYERS)
PLANS = [*(CapturePlan(LAYERS, tokens) for tokens in ("last_prompt", "generated", "prompt", "all")), None]


def sampling(max_tokens: int = 16, **options) -> vllm.SamplingParams:
    return vllm.SamplingParams(
        **{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False, **options}
    )


class Checks:
    """Runs situations on engines of one model and compares their states with Hugging Face's."""

    def __init__(self, folder: str, device: str):
        self.folder = folder
        self.device = device
        self.reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
        self.rng = np.random.default_rng(0)
        self.results: list[dict] = []

    def prompts(self, lengths) -> list[list[int]]:
        return [self.rng.integers(3, VOCABULARY, size=length).tolist() for length in lengths]

    def start(self, **options) -> CaptureEngine:
        memory = {"gpu_memory_utilization": 0.1} if self.device == "cuda" else {"kv_cache_memory_bytes": 2**28}
        defaults = {"max_model_len": 512, "max_num_batched_tokens": 128, "skip_tokenizer_init": True}
        return CaptureEngine.start(
            self.folder, LAYERS, dtype="bfloat16", disable_log_stats=False, **memory, **{**defaults, **options}
        )

    def compare(self, situation: str, groups, plans, occurred: bool, detail: str = "") -> None:
        """Check every sequence of a situation and print one line."""
        errors, rows = [], 0
        for group, plan in zip(groups, plans, strict=True):
            for generation in group:
                if plan is None:
                    assert generation.hidden_states is None
                    continue
                token_ids = generation.prompt_token_ids + generation.token_ids
                with torch.no_grad():
                    inputs = torch.tensor([token_ids[:-1]], device=self.device)
                    states = self.reference(inputs, output_hidden_states=True).hidden_states
                first, end = token_span(plan.tokens, len(generation.prompt_token_ids), len(generation.token_ids))
                assert generation.hidden_states.positions.tolist() == list(range(first, end)), situation
                for layer in generation.hidden_states.layers:
                    expected = states[layer][0, first:end].float().cpu()
                    error = (generation.hidden_states.layer(layer).float() - expected).norm(dim=1)
                    errors.append((error / expected.norm(dim=1)).max().item())
                    rows += len(expected)
        # numpy's maximum, because Python's passes over a NaN.
        worst = float(np.max(errors))
        ok = worst < ALLOWED_ERROR and occurred
        self.results.append({"situation": situation, "rows": rows, "error": worst, "ok": ok, "detail": detail})
        print(f"{'ok  ' if ok else 'FAIL'} {situation:52s} {rows:6d} rows, error {worst:.4f} {detail}", flush=True)


def metric(engine: CaptureEngine, name: str) -> int:
    return sum(entry.value for entry in engine.llm.get_metrics() if entry.name == name)


def everyday(checks: Checks) -> None:
    engine = checks.start()
    config = engine.llm.llm_engine.vllm_config
    asynchronous = bool(config.scheduler_config.async_scheduling)
    print(f"CUDA graphs {config.compilation_config.cudagraph_mode}, asynchronous scheduling {asynchronous}", flush=True)
    plans = PLANS * 8
    prompts = checks.prompts([1, 7, 64, 127, 128, 129, 200, 300] * 5)
    groups = engine.generate(prompts, [sampling(count) for count in range(1, 41)], plans)
    checks.compare("chunks, five plans, other lengths in one batch", groups, plans, True)

    whole = engine.generate(prompts, sampling(24), None)
    stops = [sampling(24, stop_token_ids=[group[0].token_ids[number % 12]]) for number, group in enumerate(whole)]
    groups = engine.generate(prompts, stops, PLANS[3])
    stopped = sum(group[0].finish_reason == "stop" for group in groups)
    checks.compare(
        "stop tokens, after which a step more may run", groups, [PLANS[3]] * 40, stopped == 40, f"{stopped} stopped"
    )

    groups = engine.generate(prompts[:10], sampling(12, n=3, temperature=1.0, seed=5), PLANS[3])
    distinct = len({tuple(sample.token_ids) for group in groups for sample in group})
    checks.compare("three seeded samples a prompt", groups, [PLANS[3]] * 10, distinct > 20, f"{distinct} distinct")

    for plan in PLANS[:4]:
        shared = checks.prompts([200])[0]
        prompts = [shared + tail for tail in checks.prompts([5, 90, 40, 17])]
        engine.generate(prompts[:1], sampling(), None)
        groups = engine.generate([*prompts, *prompts], sampling(), plan)
        cached = sum(group[0].num_cached_tokens for group in groups)
        checks.compare(f"cached prefixes, {plan.tokens}", groups, [plan] * 8, cached > 1000, f"{cached} cached")


def preemption(checks: Checks) -> None:
    # 40 blocks of 16 tokens for 12 sequences of up to 9 blocks.
    engine = checks.start(num_gpu_blocks_override=40, block_size=16, max_model_len=256)
    prompts = checks.prompts([30 + 3 * number for number in range(12)])
    for plan in PLANS[:4]:
        before = metric(engine, "vllm:num_preemptions")
        groups = engine.generate(prompts, sampling(70), plan)
        count = metric(engine, "vllm:num_preemptions") - before
        checks.compare(f"preempted, {plan.tokens}", groups, [plan] * 12, count > 0, f"{count} preemptions")


def speculation(checks: Checks, method: str) -> None:
    """``ngram`` drafts on the host, ``ngram_gpu`` on the device, which allows asynchronous scheduling."""
    drafts = {"method": method, "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    engine = checks.start(speculative_config=drafts)
    asynchronous = bool(engine.llm.llm_engine.vllm_config.scheduler_config.async_scheduling)
    prompts = [(piece * 12)[:120] for piece in checks.prompts([5, 9, 14, 20])] + checks.prompts([60] * 6)
    plans = PLANS * 2
    groups = engine.generate(prompts, sampling(60), plans)
    accepted = metric(engine, "vllm:spec_decode_num_accepted_tokens")
    drafted = metric(engine, "vllm:spec_decode_num_draft_tokens")
    checks.compare(
        f"drafts of {method}",
        groups,
        plans,
        0 < accepted < drafted,
        f"{accepted} of {drafted} accepted, asynchronous {asynchronous}",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runner", choices=["V1", "V2"], help="vLLM's model runner; by default vLLM's choice")
    parser.add_argument("--drafts", nargs="*", default=["ngram"], help="ngram, ngram_gpu")
    parser.add_argument("--only-drafts", action="store_true", help="leave out everything but speculative decoding")
    parser.add_argument("--out", type=Path, help="also write the results to this JSON file")
    options = parser.parse_args()
    if options.runner:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(options.runner == "V2"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"vLLM {vllm.__version__}, torch {torch.__version__}, {device}, runner {options.runner or 'as vLLM chooses'}")
    with tempfile.TemporaryDirectory() as folder:
        write_random_llama(folder, NUM_LAYERS, 512)
        checks = Checks(folder, device)
        if not options.only_drafts:
            everyday(checks)
            preemption(checks)
        for method in options.drafts:
            speculation(checks, method)
    if options.out:
        options.out.write_text(json.dumps(checks.results, indent=2) + "\n")
    failed = [result["situation"] for result in checks.results if not result["ok"]]
    print(f"{len(checks.results)} situations, failed: {failed or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
