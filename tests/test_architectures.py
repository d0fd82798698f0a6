"""Every architecture of docs/architectures.md, run anew on real vLLM and compared with Hugging Face."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "make_architectures.py"

COMPARED = {
    "Llama",
    "Qwen2",
    "Qwen3",
    "Mistral, sliding window",
    "Gemma",
    "Gemma 2",
    "Gemma 3",
    "Phi-3",
    "OLMo 2",
    "GPT-2",
    "OPT",
    "OPT, norm after (350m)",
    "GPT-NeoX",
    "Falcon",
    "Falcon, new decoder",
    "Mixtral",
    "Qwen2-MoE",
    "Qwen3-MoE",
    "gpt-oss",
    "DeepSeek-V2",
    "StableLM",
    "Phi",
    "Starcoder2",
    "Cohere",
    "Cohere 2",
    "EXAONE 4",
    "Granite",
    "Granite hybrid",
    "Nemotron",
    "GLM-4",
    "BLOOM",
    "GPT-J",
    "SmolVLM",
    "PaliGemma",
}
# What vLLM says to these.
REFUSED = {
    "GPT-Neo": "are not supported for now",
    "MPT": "was supported in vLLM until v0.28.0",
}


def read_table(page: str) -> dict[str, list[str]]:
    """The cells of each line of the page's table, by family."""
    lines = [line[2:-2].split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {family: cells for family, *cells in lines[2:]}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[subprocess.CompletedProcess, Path]:
    """The script's run and the page that it wrote."""
    page = tmp_path_factory.mktemp("architectures") / "architectures.md"
    command = [sys.executable, SCRIPT, "--out", page, "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert page.exists(), f"{done.stderr[-5000:]}\n{done.stdout}"
    return done, page


@pytest.fixture(scope="module")
def table(run) -> dict[str, list[str]]:
    return read_table(run[1].read_text())


def test_the_script_finds_every_line_as_it_should_be(run):
    done, _ = run
    assert done.returncode == 0, done.stdout
    assert "not as it should be" not in done.stdout


def test_every_family_is_run_or_refused_by_vllm_itself(table):
    assert set(table) == COMPARED | set(REFUSED)


@pytest.mark.parametrize("family", sorted(COMPARED))
def test_captured_states_are_hugging_faces(table, family):
    *_, error, _, remark = table[family]
    assert error != "cannot run", remark
    assert float(error) < 1e-4


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_what_cannot_run_here_is_listed_with_vllms_own_error(table, family):
    *_, error, _, remark = table[family]
    assert error == "cannot run"
    assert REFUSED[family] in remark


def test_the_page_lists_the_same_families_and_classes(table):
    page = read_table((ROOT / "docs" / "architectures.md").read_text())
    assert {family: cells[:4] for family, cells in page.items()} == {
        family: cells[:4] for family, cells in table.items()
    }


@pytest.mark.parametrize("family", ["Mistral, sliding window", "Gemma 2", "Gemma 3", "Cohere 2", "EXAONE 4"])
def test_a_sliding_window_that_were_ignored_would_show(tmp_path, family):
    script = runpy.run_path(str(SCRIPT))
    family = script["FAMILIES"][family]
    script["write_model"](family, tmp_path)
    prompt = [script["random_prompts"](512)[-1]]
    arguments = family.hugging_face, tmp_path, prompt, range(4)
    narrow, wide = (
        script["hugging_face_states"](*arguments, sliding_window=window)[torch.float32] for window in (16, 256)
    )
    assert script["relative_error"](narrow, wide) > 0.1


def test_no_block_of_a_random_model_does_nothing(tmp_path):
    script = runpy.run_path(str(SCRIPT))
    for number, name in enumerate(sorted(COMPARED)):
        family = script["FAMILIES"][name]
        folder = tmp_path / str(number)
        script["write_model"](family, folder)
        layers = family.layers or range(4)
        [states] = script["hugging_face_states"](family.hugging_face, folder, [[5, 6, 7, 8]], layers)[torch.float32]
        change = (states[1:] - states[:-1]).norm(dim=-1) / states[:-1].norm(dim=-1)
        assert change.min() > 0.1, name


# A real vLLM model, without the rest of an engine.
BUILD_AND_SEARCH = """
import sys
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from polygraph_hs.capture.layers import find_decoder_layers

folder = sys.argv[1]
config = EngineArgs(folder, dtype="float32", enforce_eager=True, skip_tokenizer_init=True).create_engine_config()
with set_current_vllm_config(config):
    init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
    initialize_model_parallel()
    model = initialize_model(config)
print("found", find_decoder_layers(model, 4).path)
find_decoder_layers(model, 5)
"""


def test_decoder_layers_that_cannot_be_found_are_an_error_that_lists_what_was_looked_at(tiny_llama):
    done = subprocess.run(
        [sys.executable, "-c", BUILD_AND_SEARCH, tiny_llama], capture_output=True, text=True, check=False
    )
    assert "found model.layers" in done.stdout
    assert re.search(
        r"ValueError: cannot tell which modules are the decoder layers of LlamaForCausalLM: expected exactly one "
        r"ModuleList of 5 entries, found 0\. Looked at: model\.layers \(4\)",
        done.stderr,
    )
