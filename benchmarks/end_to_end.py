"""From questions to uncertainties through lm-polygraph's UEManager: what does each way cost beside plain vLLM?

    python benchmarks/end_to_end.py [--model PATH] [--questions 128] [--repeats 3] [--out FILE]

The world-facts questions through the model's chat template, answered greedily. Timed in turns:

- plain vLLM: LLM.generate with the log-probabilities of the 20 most probable tokens; no uncertainties
- WhiteboxModelvLLM: lm-polygraph's own vLLM model, three estimators from log-probabilities
- HiddenStatesModel, log-probabilities: the same three estimators
- HiddenStatesModel, states: those, and four estimators on the hidden states of one layer
- WhiteboxModel: lm-polygraph's Hugging Face model, the three estimators

Beside the ratio stands what turning vLLM's outputs and states into lm-polygraph's statistics took, in parts of the time
that vLLM spent on generating in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import numpy as np
import torch
import vllm
from lm_polygraph import WhiteboxModel
from lm_polygraph.defaults.register_default_stat_calculators import register_default_stat_calculators
from lm_polygraph.estimators import MaximumSequenceProbability, MeanTokenEntropy, Perplexity
from lm_polygraph.model_adapters import WhiteboxModelvLLM
from lm_polygraph.utils.builder_enviroment_stat_calculator import BuilderEnvironmentStatCalculator
from lm_polygraph.utils.dataset import Dataset
from lm_polygraph.utils.generation_parameters import GenerationParameters
from lm_polygraph.utils.manager import UEManager
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.platforms import current_platform

from polygraph_hs import HiddenStatesModel
from polygraph_hs.datasets import load_world_facts
from polygraph_hs.estimators import LinearProbe, MahalanobisDistance
from polygraph_hs.smollm2 import smollm2_path
from polygraph_hs.stat_calculators import all_stat_calculators
from polygraph_hs.stat_calculators.generation import GenerationCalculator

NUM_LOGPROBS = 20


class Clock:
    """Adds up the seconds that calls of some functions take."""

    def __init__(self):
        self.seconds = 0.0

    def watch(self, owner: object, name: str) -> None:
        call = getattr(owner, name)

        def timed(*args, **kwargs):
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        setattr(owner, name, timed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or hub name; SmolLM2-135M-Instruct if not given")
    parser.add_argument("--questions", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--generate", type=int, default=24, help="most tokens of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, help="also write the seconds to this JSON file")
    options = parser.parse_args()
    on_cpu = current_platform.is_cpu()
    path = options.model or str(smollm2_path())
    memory = {"kv_cache_memory_bytes": 2**30, "enforce_eager": True} if on_cpu else {"gpu_memory_utilization": 0.35}
    engine_options = {"dtype": options.dtype, "max_model_len": 512, "enable_prefix_caching": False, **memory}

    tokenizer = AutoTokenizer.from_pretrained(path)
    facts = load_world_facts("train").head(options.questions)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in facts["question"]
    ]
    parameters = GenerationParameters(max_new_tokens=options.generate)
    plain = vllm.LLM(path, **engine_options)
    sampling = vllm.SamplingParams(temperature=0, max_tokens=options.generate, logprobs=NUM_LOGPROBS)
    logprobs = [MaximumSequenceProbability(), Perplexity(), MeanTokenEntropy()]

    layer = 2 * plain.llm_engine.vllm_config.model_config.hf_text_config.num_hidden_layers // 3
    probes = [
        estimator(layer, tokens=tokens, pooling=pooling)
        for estimator in (LinearProbe, MahalanobisDistance)
        for tokens, pooling in (("last_prompt", "last"), ("generated", "mean"))
    ]
    ours = HiddenStatesModel.from_pretrained(
        path,
        estimators=probes,
        generation_parameters=parameters,
        num_logprobs=NUM_LOGPROBS,
        verbose=False,
        **engine_options,
    )
    answers = ours.capture(texts)
    lengths = [len(answer.token_ids) for answer in answers]
    for probe in probes:
        # What it is fitted on does not change what it costs.
        probe.fit([answer.hidden_states for answer in answers], np.array(lengths) > np.median(lengths))
    without = HiddenStatesModel.from_llm(
        ours.engine.llm,
        layers=[layer],
        tokens="last_prompt",
        generation_parameters=parameters,
        num_logprobs=NUM_LOGPROBS,
        verbose=False,
    )
    generating, calculating = Clock(), Clock()
    generating.watch(ours.engine.llm, "generate")
    calculating.watch(GenerationCalculator, "__call__")

    hugging_face = WhiteboxModel(
        AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, options.dtype)).to("cpu" if on_cpu else "cuda"),
        AutoTokenizer.from_pretrained(path, padding_side="left"),
        generation_parameters=parameters,
    )
    hugging_face.tokenizer.pad_token = hugging_face.tokenizer.eos_token
    whitebox = WhiteboxModelvLLM(plain, sampling.clone(), parameters, device="cpu" if on_cpu else "cuda")
    defaults = register_default_stat_calculators("Whitebox", output_attentions=False, output_hidden_states=False)

    def manager(model, estimators: list, calculators: list) -> Callable[[], None]:
        def run() -> None:
            UEManager(
                Dataset(texts, [""] * len(texts), batch_size=options.batch_size),
                model,
                estimators,
                BuilderEnvironmentStatCalculator(model),
                calculators,
                [],
                [],
                [],
                ignore_exceptions=False,
                verbose=False,
                max_new_tokens=options.generate,
            )()

        return run

    batches = [texts[first : first + options.batch_size] for first in range(0, len(texts), options.batch_size)]
    variants = {
        "plain vLLM": lambda: [plain.generate(batch, sampling, use_tqdm=False) for batch in batches],
        "WhiteboxModelvLLM": manager(whitebox, logprobs, defaults),
        "HiddenStatesModel, log-probabilities": manager(without, logprobs, all_stat_calculators()),
        "HiddenStatesModel, states": manager(ours, [*logprobs, *probes], all_stat_calculators()),
        "WhiteboxModel": manager(hugging_face, logprobs, defaults),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    conversion: dict[str, list[float]] = {name: [] for name in variants}
    generation: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(options.repeats + 1):
        for name, run in variants.items():
            generating.seconds = calculating.seconds = 0.0
            start = time.perf_counter()
            run()
            # The first round warms up.
            if number:
                seconds[name].append(time.perf_counter() - start)
                if calculating.seconds:
                    conversion[name].append(calculating.seconds / generating.seconds - 1)
                    generation[name].append(generating.seconds)
    device = f"CPU, {os.cpu_count()} cores" if on_cpu else torch.cuda.get_device_name()
    print(
        f"\nvLLM {vllm.__version__}, {device}; {Path(path).name}, {options.dtype}; {len(texts)} questions, batches of "
        f"{options.batch_size}, at most {options.generate} tokens, {np.mean(lengths):.1f} on average; medians of "
        f"{options.repeats}\n{'':38s} {'median':>10s}   ratio   conversion and delivery"
    )
    reference = np.median(seconds["plain vLLM"])
    for name, values in seconds.items():
        share = ""
        if conversion[name]:
            share = f"{np.median(conversion[name]):8.1%} of vLLM's {np.median(generation[name]):.3f} s"
        print(f"{name:38s} {np.median(values):8.3f} s  {np.median(values) / reference:6.3f}   {share}")
    if options.out:
        options.out.write_text(
            json.dumps({"seconds": seconds, "generation": generation, "conversion": conversion}, indent=2) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
