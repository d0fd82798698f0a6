"""Are the states of a compiled bfloat16 engine as right as bfloat16 can be?

    python benchmarks/gpu_accuracy.py [--out FILE] [--layers 12] [--hidden-size 512]

A random Llama runs three times on the same tokens: Hugging Face in float32 (the reference), Hugging Face in bfloat16
(what the number format itself costs), and this project on vLLM in bfloat16, compiled and with CUDA graphs, with
prompts of 5 to 300 tokens in one batch and chunked prefill at 256 tokens. For every layer the capture's error may be
at most 1.5 times Hugging Face's own. Exits with 1 if a layer's is more.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
import vllm
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from polygraph_hs.engine import CaptureEngine
from polygraph_hs.spec import CapturePlan

ALLOWED_RATIO = 1.5
PROMPT_LENGTHS = (5, 12, 31, 32, 33, 64, 100, 127, 129, 200, 255, 256, 257, 300)
NEW_TOKENS = 16
VOCABULARY = 4096


def write_random_llama(folder: str, num_layers: int, hidden_size: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 128,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
    )
    # Weights that bfloat16 holds exactly: the three runs differ in arithmetic alone.
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def hugging_face_states(folder: str, dtype: torch.dtype, device: str, sequences: list[list[int]]) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    states = []
    for token_ids in sequences:
        with torch.no_grad():
            output = model(torch.tensor([token_ids[:-1]], device=device), output_hidden_states=True)
        states.append(torch.stack(output.hidden_states)[:, 0].float().cpu())
    return states


def layer_errors(states: list[torch.Tensor], reference: list[torch.Tensor]) -> np.ndarray:
    """For each layer |states - reference| / |reference| over all positions of all sequences."""
    difference = torch.cat([a - b for a, b in zip(states, reference, strict=True)], dim=1)
    whole = torch.cat(reference, dim=1)
    return (difference.flatten(1).norm(dim=1) / whole.flatten(1).norm(dim=1)).numpy()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the numbers to this JSON file")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--enforce-eager", action="store_true")
    options = parser.parse_args()

    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCABULARY, size=length).tolist() for length in PROMPT_LENGTHS]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        write_random_llama(folder, options.layers, options.hidden_size)
        engine_options = {"gpu_memory_utilization": 0.3} if device == "cuda" else {"kv_cache_memory_bytes": 2**28}
        engine = CaptureEngine.start(
            folder,
            range(options.layers + 1),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=512,
            max_num_batched_tokens=256,
            enforce_eager=options.enforce_eager,
            **engine_options,
        )
        config = engine.llm.llm_engine.vllm_config
        sampling = vllm.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
        plan = CapturePlan(tuple(range(options.layers + 1)), "all")
        # Twice: the second time every graph is replayed, and what the first left in the buffers must not show.
        runs = [[group[0] for group in engine.generate(prompts, sampling, plan)] for _ in range(2)]
        sequences = [generation.prompt_token_ids + generation.token_ids for generation in runs[1]]
        captured = [generation.hidden_states.values.float() for generation in runs[1]]
        reference = hugging_face_states(folder, torch.float32, device, sequences)
        own = layer_errors(hugging_face_states(folder, torch.bfloat16, device, sequences), reference)
        ours = layer_errors(captured, reference)

    worst = {
        "row": max(
            ((a - b).norm(dim=-1) / b.norm(dim=-1)).max().item() for a, b in zip(captured, reference, strict=True)
        )
    }
    print(
        f"vLLM {vllm.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}; CUDA graphs "
        f"{config.compilation_config.cudagraph_mode}, compilation {config.compilation_config.mode}"
    )
    print(f"{len(prompts)} prompts of {min(PROMPT_LENGTHS)} to {max(PROMPT_LENGTHS)} tokens, {NEW_TOKENS} generated")
    print("layer   capture bf16   Hugging Face bf16   ratio")
    # The embeddings have no arithmetic, so both are exact there.
    ratios = np.divide(ours, own, out=np.where(ours == 0, 0.0, np.inf), where=own > 0)
    for layer, (mine, theirs, ratio) in enumerate(zip(ours, own, ratios, strict=True)):
        print(f"{layer:5d}   {mine:12.6f}   {theirs:17.6f}   {ratio:5.2f}")
    print(
        f"largest ratio {ratios.max():.3f}, allowed {ALLOWED_RATIO}; largest error of a single row {worst['row']:.4f}"
    )
    if options.out:
        results = {"capture": ours.tolist(), "hugging_face": own.tolist(), "ratio": ratios.tolist(), **worst}
        options.out.write_text(json.dumps(results, indent=2) + "\n")
    return int(ratios.max() > ALLOWED_RATIO)


if __name__ == "__main__":
    sys.exit(main())
