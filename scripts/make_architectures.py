"""Write docs/architectures.md: captured states against Hugging Face's, one small random model a family.

    python scripts/make_architectures.py [--family NAME ...] [--model FOLDER ...] [--out FILE] [--check]

vLLM runs each model with capture, and Hugging Face runs the tokens that came out with ``output_hidden_states``.
With --family or --model, for models of one's own, the table is printed and only written where --out says. --check
exits with 1 if an error is 1e-4 or more, or if a model fails that vLLM's CPU build is not known to refuse.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from torch import nn

from polygraph_hs.capture.layers import find_decoder_layers
from polygraph_hs.datasets import load_world_facts
from polygraph_hs.engine import CaptureEngine, Generation
from polygraph_hs.spec import CapturePlan

TARGET = Path(__file__).parents[1] / "docs" / "architectures.md"
ALLOWED_ERROR = 1e-4
PROMPT_LENGTHS = (1, 2, 15, 31, 32, 33, 64, 90)
NEW_TOKENS = 8
CHUNK = 32
WINDOW = 16
SEED = 20250

PAGE = """\
# Architectures

Written by `python scripts/make_architectures.py` with vLLM {vllm}, torch {torch} and transformers {transformers}.

Each line is a small random model with {layers} blocks, in float32. Norm weights and biases are random too, so a norm
that is left out shows. vLLM generates {new} tokens for prompts of {lengths} tokens, in one batch and with prefill in
chunks of {chunk} tokens, and every layer is captured at every position. Hugging Face then runs the same tokens with
`output_hidden_states`, in a process of its own. *Error* is the largest, over all layers, positions and prompts, of
`norm(captured - Hugging Face) / norm(Hugging Face)`; it has to be below {allowed:.0e}. *Rounding* is the same for
Hugging Face in float32 against itself in float64: what the number format costs. Sliding windows are {window} tokens,
shorter than most prompts. Vision-language models are given text alone.

*Blocks return* is the form that capture reads: the state; `(state, None)`; `(update, residual)`, whose sum is the
state; `(state, leftover)`, where the sum has been taken already; *batch of 1* is a leading dimension.

To check a family, or a model of your own in a folder with its tokenizer (12 bytes of memory a parameter):

    python scripts/make_architectures.py --family Llama
    python scripts/make_architectures.py --model FOLDER --check

{table}
"""


@dataclass(frozen=True)
class Family:
    """A kind of model.

    Attributes:
        hugging_face: the Hugging Face class.
        config: the configuration of a small one.
        layers: the layers to compare, by default all.
        reference: what Hugging Face's configuration has to be changed to for the same model.
        engine: options of vLLM that the family needs.
        refused: part of the error with which vLLM's CPU build refuses it, if it does.
        note: what is special about the comparison.
    """

    hugging_face: str
    config: dict = field(default_factory=dict)
    layers: tuple[int, ...] | None = None
    reference: dict = field(default_factory=dict)
    engine: dict = field(default_factory=dict)
    refused: str | None = None
    note: str = ""


# Heads of 64, because vLLM's attention on the CPU refuses very small ones.
SMALL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Families from before grouped-query attention, which derive the width of the MLP from the hidden size.
SMALL_OLD = {name: SMALL[name] for name in SMALL if name not in ("intermediate_size", "num_key_value_heads")}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
MULTIPLIERS = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
}
GEMMA = {**SMALL, "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": WINDOW}
GEMMA_3 = {**GEMMA, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
OPT = {**SMALL_OLD, "ffn_dim": 256, "word_embed_proj_dim": 128}
FALCON = {**SMALL_OLD, "alibi": False}
DEEPSEEK = {
    **SMALL,
    "num_key_value_heads": 2,
    # vLLM's latent attention on the CPU has these two sizes only, those of DeepSeek's own models.
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_group": 1,
    "topk_group": 1,
}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 1,
    "image_size": 56,
    "patch_size": 14,
}

FAMILIES = {
    "Llama": Family("LlamaForCausalLM", SMALL),
    "Qwen2": Family("Qwen2ForCausalLM", SMALL),
    "Qwen3": Family("Qwen3ForCausalLM", {**SMALL, "head_dim": 64}),
    "Mistral, sliding window": Family("MistralForCausalLM", {**SMALL, "sliding_window": WINDOW}),
    "Gemma": Family("GemmaForCausalLM", {**SMALL, "head_dim": 64}),
    "Gemma 2": Family("Gemma2ForCausalLM", GEMMA),
    "Gemma 3": Family("Gemma3ForCausalLM", GEMMA_3),
    "Phi-3": Family("Phi3ForCausalLM", SMALL),
    "OLMo 2": Family("Olmo2ForCausalLM", SMALL),
    "GPT-2": Family("GPT2LMHeadModel", SMALL_OLD),
    "OPT": Family("OPTForCausalLM", OPT),
    "OPT, norm after (350m)": Family(
        "OPTForCausalLM",
        {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 64},
        layers=(0, 1, 2),
        note="the last state is projected to another width, so layer -1 cannot be captured",
    ),
    "GPT-NeoX": Family("GPTNeoXForCausalLM", {**SMALL_OLD, "intermediate_size": 256}),
    "Falcon": Family("FalconForCausalLM", FALCON),
    "Falcon, new decoder": Family("FalconForCausalLM", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 1}),
    "Mixtral": Family("MixtralForCausalLM", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2-MoE": Family("Qwen2MoeForCausalLM", {**SMALL, **EXPERTS, "shared_expert_intermediate_size": 128}),
    "Qwen3-MoE": Family("Qwen3MoeForCausalLM", {**SMALL, **EXPERTS, "head_dim": 64}),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        {**SMALL, "head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    ),
    "DeepSeek-V2": Family(
        "DeepseekV2ForCausalLM",
        DEEPSEEK,
        engine={"attention_backend": "CPU_MLA", "compilation_config": {"custom_ops": ["-rotary_embedding"]}},
        note=(
            'with `attention_backend="CPU_MLA"`, because on a CPU with AMX vLLM takes an attention for bfloat16 alone, '
            'and `compilation_config={"custom_ops": ["-rotary_embedding"]}`, because its rotary embedding for the CPU '
            "is wrong where query heads are not contiguous; vLLM prefills without chunks here"
        ),
    ),
    "StableLM": Family("StableLmForCausalLM", SMALL),
    "Phi": Family("PhiForCausalLM", SMALL),
    "Starcoder2": Family("Starcoder2ForCausalLM", SMALL),
    "Cohere": Family("CohereForCausalLM", SMALL),
    "Cohere 2": Family(
        "Cohere2ForCausalLM",
        {**SMALL, "sliding_window": WINDOW, "sliding_window_pattern": 2},
        reference={"sliding_window": WINDOW + 1},
        note="vLLM's sliding window is one token longer than Hugging Face's; compared at the same length",
    ),
    "EXAONE 4": Family("Exaone4ForCausalLM", {**SMALL, "sliding_window": WINDOW, "sliding_window_pattern": 2}),
    "Granite": Family("GraniteForCausalLM", {**SMALL, **MULTIPLIERS}),
    "Granite hybrid": Family(
        "GraniteMoeHybridForCausalLM",
        {
            **SMALL,
            **MULTIPLIERS,
            "layer_types": ["attention"] * 3,
            "num_local_experts": 0,
            "shared_intermediate_size": 256,
            "position_embedding_type": "rope",
        },
    ),
    "Nemotron": Family("NemotronForCausalLM", SMALL),
    "GLM-4": Family("Glm4ForCausalLM", {**SMALL, "head_dim": 64}),
    "BLOOM": Family(
        "BloomForCausalLM",
        SMALL_OLD,
        note="vLLM computes the exact GELU where Hugging Face computes its tanh form; compared with the exact one",
    ),
    "GPT-J": Family("GPTJForCausalLM", {**SMALL_OLD, "rotary_dim": 32}),
    "SmolVLM": Family(
        "SmolVLMForConditionalGeneration",
        {"text_config": {**SMALL, "model_type": "llama"}, "vision_config": VISION, "image_token_id": 511},
    ),
    "PaliGemma": Family(
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": {**SMALL, "head_dim": 64, "model_type": "gemma"},
            "vision_config": {**VISION, "model_type": "siglip_vision_model"},
            "image_token_index": 511,
            "projection_dim": 128,
        },
    ),
    "GPT-Neo": Family(
        "GPTNeoForCausalLM",
        {**SMALL_OLD, "attention_types": [[["global"], 3]]},
        refused="are not supported for now",
    ),
    "MPT": Family("MptForCausalLM", SMALL_OLD, refused="was supported in vLLM until v0.28.0"),
}


@dataclass
class Row:
    """A line of the table; ``error`` is None and ``failure`` is vLLM's message if there was nothing to compare."""

    name: str
    hugging_face: str
    layers: str
    note: str = ""
    vllm: str = "-"
    returns: str = "-"
    error: float | None = None
    rounding: float | None = None
    failure: str = ""
    ok: bool = False

    def cells(self) -> list[str]:
        """The columns of :data:`COLUMNS`."""
        remark = self.failure or self.note
        if self.error is None:
            return [self.name, self.hugging_face, self.vllm, self.returns, "none", "cannot run", "-", remark]
        errors = [f"{self.error:.1e}", f"{self.rounding:.1e}"]
        return [self.name, self.hugging_face, self.vllm, self.returns, self.layers, *errors, remark]


COLUMNS = ("Family", "Hugging Face class", "vLLM class", "Blocks return", "Layers", "Error", "Rounding", "Remark")


def table(rows: list[Row]) -> str:
    """A Markdown table."""
    lines = [list(COLUMNS), ["---"] * len(COLUMNS), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def page(rows: list[Row], vllm_version: str) -> str:
    """The text of docs/architectures.md."""
    return PAGE.format(
        vllm=vllm_version,
        torch=torch.__version__,
        transformers=transformers.__version__,
        layers=SMALL["num_hidden_layers"],
        new=NEW_TOKENS,
        lengths=f"{PROMPT_LENGTHS[0]} to {PROMPT_LENGTHS[-1]}",
        chunk=CHUNK,
        allowed=ALLOWED_ERROR,
        window=WINDOW,
        table=table(rows),
    )


def load_hugging_face(hugging_face: str, folder: str, **changes) -> nn.Module:
    """Hugging Face's model in float32, with the plain implementations, which have every feature and every dtype."""
    model = getattr(transformers, hugging_face).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager", **changes
    )
    for module in model.modules():
        # The tanh form is fixed in BLOOM's code, and vLLM's BLOOM has the exact GELU: 1e-4 apart.
        if type(module).__name__ == "BloomMLP":
            module.gelu_impl = nn.GELU()
    return model.eval()


def write_model(family: Family, folder: str) -> None:
    """Save a random model in which every weight matters."""
    hugging_face = getattr(transformers, family.hugging_face)
    torch.manual_seed(SEED)
    model = hugging_face(hugging_face.config_class(**family.config))
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                noise = torch.randn(parameter.shape)
                if isinstance(module, nn.Embedding):
                    parameter.copy_(0.1 * noise)
                elif parameter.dim() > 1:
                    parameter.copy_(noise / parameter.shape[-1] ** 0.5)
                else:
                    parameter.add_(0.3 * noise)
    model.save_pretrained(folder)


def hugging_face_states(
    hugging_face: str, folder: str, sequences: list[list[int]], layers: Sequence[int], **changes
) -> dict[torch.dtype, list[torch.Tensor]]:
    """For float32 and float64, the states of each sequence, ``(layers, tokens, hidden_size)``."""
    model = load_hugging_face(hugging_face, folder, **changes)
    states = {}
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        with torch.no_grad():
            outputs = [model(torch.tensor([ids]), output_hidden_states=True).hidden_states for ids in sequences]
        states[dtype] = [torch.stack([hidden[layer][0] for layer in layers]) for hidden in outputs]
    return states


def relative_error(states: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    """The largest over all rows of |states - reference| / |reference|."""
    errors = [
        ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).flatten()
        for ours, theirs in zip(states, reference, strict=True)
    ]
    # torch's maximum, because Python's passes over a NaN.
    return torch.cat(errors).max().item()


def output_form(output, residual_is_pending: bool | None) -> str:
    """What a block returns, in words."""
    state = output[0] if isinstance(output, tuple) else output
    batch = ", batch of 1" if state.dim() == 3 else ""
    if not isinstance(output, tuple):
        return f"state{batch}"
    if len(output) == 1:
        return f"(state,){batch}"
    if output[1] is None:
        return f"(state, None){batch}"
    return f"(update, residual){batch}" if residual_is_pending else f"(state, leftover){batch}"


def capture(
    folder: str, prompts: list[list[int]], layers: Sequence[int], is_multimodal: bool, **options
) -> tuple[str, str, list[Generation]]:
    """Run a model in vLLM: the name of its class, what its blocks return, and the generations."""
    from vllm import SamplingParams

    engine = CaptureEngine.start(
        folder,
        layers,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=2**28,
        max_model_len=128,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=len(PROMPT_LENGTHS),
        distributed_executor_backend="uni",
        **({"language_model_only": True} if is_multimodal else {}),
        **options,
    )
    forms = set()

    def watch(model: nn.Module) -> str:
        decoder = find_decoder_layers(model, engine.num_hidden_layers)
        pending = decoder.residual_is_pending()
        for block in decoder.blocks:
            block.register_forward_hook(lambda module, args, output: forms.add(output_form(output, pending)))
        return type(model).__name__

    try:
        [name] = engine.llm.apply_model(watch)
        sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
        generations = engine.generate(prompts, sampling, CapturePlan(tuple(layers), "all"))
        return name, "; ".join(sorted(forms)), [generation for [generation] in generations]
    finally:
        engine.llm.llm_engine.engine_core.shutdown()


def random_prompts(vocabulary_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randint(3, vocabulary_size, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def text_prompts(folder: str) -> list[list[int]]:
    """Pieces of a text: on random tokens a trained model is ill-conditioned at single positions."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    token_ids = tokenizer(" ".join(load_world_facts()["question"]))["input_ids"]
    return [token_ids[100 * number :][:length] for number, length in enumerate(PROMPT_LENGTHS)]


def gist(message: str) -> str:
    """The sentence that matters, in vLLM's words: around it stand the whole input and all the models vLLM knows."""
    line = message.split("Value error, ")[-1].split("\n")[0]
    return line.split(" [type=")[0].split(" Supported architectures")[0].replace("|", "/").strip()


def compare(name: str, family: Family | None, folder: str, reference: ProcessPoolExecutor) -> Row:
    """Run one model in vLLM and in Hugging Face; what vLLM refuses becomes a row with its error."""
    if family is not None:
        reference.submit(write_model, family, folder).result()
    config = transformers.AutoConfig.from_pretrained(folder)
    text_config = config.get_text_config()
    hugging_face = config.architectures[0]
    layers = tuple(range(text_config.num_hidden_layers + 1))
    prompts = text_prompts(folder) if family is None else random_prompts(text_config.vocab_size)
    family = family or Family(hugging_face)
    layers = family.layers or layers
    row = Row(name, hugging_face, f"{layers[0]} to {layers[-1]}", family.note)
    try:
        row.vllm, row.returns, generations = capture(
            folder, prompts, layers, config is not text_config, **family.engine
        )
    except Exception as error:
        row.failure = f"{type(error).__name__}: {gist(str(error))}"
        row.ok = family.refused is not None and family.refused in row.failure
        return row
    sequences = [(generation.prompt_token_ids + generation.token_ids)[:-1] for generation in generations]
    states = reference.submit(hugging_face_states, hugging_face, folder, sequences, layers, **family.reference).result()
    row.error = relative_error([generation.hidden_states.values for generation in generations], states[torch.float32])
    row.rounding = relative_error(states[torch.float32], states[torch.float64])
    row.ok = row.error < ALLOWED_ERROR
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", choices=FAMILIES, metavar="NAME", help=", ".join(FAMILIES))
    parser.add_argument("--model", action="append", metavar="FOLDER", help="a model of your own, with its tokenizer")
    parser.add_argument("--out", type=Path, help=f"by default {TARGET.name} in docs/ for all families, else no file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a line is not as it should be")
    options = parser.parse_args()
    everything = not options.family and not options.model
    names = list(FAMILIES) if everything else options.family or []
    out = options.out or (TARGET if everything else None)

    # Read when vLLM is imported. Its engine runs in this process, so that one import serves every model.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory

    rows = []
    wrong = []
    # vLLM changes Hugging Face's classes for its Transformers backend; the reference process never imports vLLM.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as reference:
        for name in [*names, *(options.model or [])]:
            start = time.perf_counter()
            family = FAMILIES.get(name)
            with tempfile.TemporaryDirectory() as folder:
                rows.append(compare(name, family, folder if family else name, reference))
            cleanup_dist_env_and_memory()
            row = rows[-1]
            outcome = row.failure if row.error is None else f"error {row.error:.1e}, rounding {row.rounding:.1e}"
            if not row.ok:
                wrong.append(f"not as it should be: {row.name}: {outcome}")
            print(f"{row.name:26}{time.perf_counter() - start:5.1f} s   {outcome}", flush=True)
    if out is None:
        print(table(rows))
    else:
        out.write_text(page(rows, vllm.__version__))
        print(f"written to {out}")
    for line in wrong:
        print(line)
    return int(options.check and bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
