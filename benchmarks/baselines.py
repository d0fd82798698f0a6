"""What this project's capture is measured against, and the slow path that its states are compared with.

Worker extensions, to be loaded by ``LLM(worker_extension_cls="baselines....")`` in an engine whose process finds this
folder, and the other projects' ways to hidden states, each as one function from prompts to states in the caller's
hands.
"""

from __future__ import annotations

import hashlib
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from polygraph_hs.capture.layout import read_layout
from polygraph_hs.spec import token_span


class EagerHooks:
    """The mechanism of known extensions: eager forward hooks that slice each request's rows, kept on the device.

    After the batch every request's rows are put together, converted to float32, pickled and sent over RPC.
    """

    def hooks_install(self, layers: list[int]) -> None:
        self.hooks_rows: dict[str, dict[int, list[torch.Tensor]]] = {}
        blocks = self.get_model().model.layers
        for layer in layers:
            blocks[layer - 1].register_forward_hook(self._hook(layer))

    def _hook(self, layer: int) -> Callable:
        def keep(module, args, output):
            state = output[0] + output[1] if isinstance(output, tuple) else output
            layout = self._hooks_layout()
            if layout is None:
                return
            starts = layout.query_start.tolist()
            for number, req_id in enumerate(layout.req_ids):
                rows = state[starts[number] : starts[number + 1]].clone()
                self.hooks_rows.setdefault(req_id, {}).setdefault(layer, []).append(rows)

        return keep

    def _hooks_layout(self):
        """The running step's layout; None while vLLM warms up."""
        runner = self.model_runner
        if hasattr(runner, "input_batch"):
            return read_layout(runner) if runner.input_batch.num_reqs else None
        return None

    def hooks_take(self) -> bytes:
        """Pickled ``{request id: {layer: float32 (tokens, hidden_size)}}``; then forgotten."""
        rows, self.hooks_rows = self.hooks_rows, {}
        return pickle.dumps(
            {
                req_id: {layer: torch.cat(parts).float().cpu().numpy() for layer, parts in of_layer.items()}
                for req_id, of_layer in rows.items()
            }
        )


class SlowPath:
    """Keeps every row of every request once more, the plain way, to compare with what capture delivers.

    After each step each request's slice of each tap's buffer is cloned. For a worker that captures, in batches that
    are neither preempted nor find prefixes in the cache, so that a request's rows arrive in order.
    """

    def slow_path_start(self) -> None:
        capture = self.capture
        self.slow_rows: dict[str, list[torch.Tensor]] = {}
        record = type(capture).record
        # The taps' own buffers, wherever the modules have them.
        buffers = {path.rsplit(".", 1)[-1]: buffer for path, buffer in self.get_model().named_buffers()}
        taps = [buffers[f"polygraph_hs_layer_{layer}"] for layer in capture.tap.layers]

        def record_twice(layout) -> None:
            record(capture, layout)
            starts = layout.query_start.tolist()
            for number, req_id in enumerate(layout.req_ids):
                rows = slice(starts[number], starts[number + 1])
                self.slow_rows.setdefault(req_id, []).append(torch.stack([tap[rows] for tap in taps]))

        capture.record = record_twice

    def slow_path_take(self, tokens: str, pooling: str, prompt_length: int, num_generated: int) -> list:
        """For each request, by its number: the SHA-256 of its states, or the bytes of its float64 means."""
        del self.capture.record
        start, stop = token_span(tokens, prompt_length, num_generated)
        answers = []
        for req_id in sorted(self.slow_rows, key=lambda req_id: int(req_id.split("-", 1)[0])):
            rows = torch.cat(self.slow_rows.pop(req_id), dim=1)[:, start:stop]
            if pooling == "mean":
                answers.append(rows.double().mean(dim=1).cpu().numpy().tobytes())
            else:
                answers.append(digest(rows[:, -1:] if pooling == "last" else rows))
        return answers


def digest(states: torch.Tensor) -> bytes:
    """SHA-256 of a tensor's bytes."""
    return hashlib.sha256(states.contiguous().cpu().view(torch.uint8).numpy().tobytes()).digest()


def extraction_options(layers: list[int], folder: str) -> dict:
    """Options of an LLM with vLLM's own extraction of hidden states."""
    return {
        "enable_chunked_prefill": False,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        },
        "kv_transfer_config": {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": folder},
        },
    }


def extract(llm, prompts: list[dict], sampling) -> list[torch.Tensor]:
    """States of prompt and generation from vLLM's own extraction, read back from the files that it writes."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as connector

    params = sampling.clone()
    params.extra_args = {"kv_transfer_params": {"include_output_tokens": True}}
    load = getattr(connector, "load_hidden_states", load_file)
    states = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        path = output.kv_transfer_params["hidden_states_path"]
        states.append(load(path)["hidden_states"])
        for leftover in (Path(path), Path(path + ".lock")):
            leftover.unlink(missing_ok=True)
    return states


def extraction_folder() -> tempfile.TemporaryDirectory:
    """Where the files go: memory, if there is such a folder."""
    shared_memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else None)


def lens(llm, prompts: list[dict], sampling, layers: list[int]) -> list:
    """States of prompt and generation from vllm-lens, whose layers are 0-based blocks."""
    params = sampling.clone()
    params.extra_args = {"output_residual_stream": [layer - 1 for layer in layers]}
    return [output.activations["residual_stream"] for output in llm.generate(prompts, params, use_tqdm=False)]


@torch.inference_mode()
def second_pass(model, sequences: list[list[int]], layers: list[int], batch_size: int) -> list[torch.Tensor]:
    """States of whole sequences, all of the same length, from a Hugging Face forward pass, on the host."""
    states = []
    for first in range(0, len(sequences), batch_size):
        ids = torch.tensor(sequences[first : first + batch_size], device=model.device)
        hidden = model.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        states += torch.stack([hidden[layer] for layer in layers], dim=1).cpu().unbind()
    return states
