"""What Hugging Face computes for the same tokens."""

from dataclasses import replace
from functools import cache

import numpy as np
import torch
from transformers import AutoTokenizer

from polygraph_hs.capture.delivery import Parcel, SegmentPool, new_token
from polygraph_hs.capture.recorder import Collected
from polygraph_hs.datasets import load_world_facts
from polygraph_hs.smollm2 import smollm2_path


def reference_states(hugging_face, token_ids) -> torch.Tensor:
    """``output_hidden_states`` for a sequence but its last token: (layers + 1, tokens - 1, hidden_size)."""
    with torch.no_grad():
        output = hugging_face(torch.tensor([token_ids[:-1]]), output_hidden_states=True)
    return torch.stack(output.hidden_states)[:, 0]


def reference_log_likelihoods(hugging_face, prompt_ids, token_ids) -> np.ndarray:
    """Natural log-probability of each generated token."""
    with torch.no_grad():
        logits = hugging_face(torch.tensor([prompt_ids + token_ids])).logits[0]
    rows = torch.log_softmax(logits.float(), dim=-1)[len(prompt_ids) - 1 : -1]
    return rows.gather(1, torch.tensor(token_ids)[:, None])[:, 0].numpy()


def relative_error(states: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest over the rows of |states - reference| / |reference|."""
    assert states.shape == reference.shape
    return ((states - reference).norm(dim=-1) / reference.norm(dim=-1)).max().item()


def firsts(groups: list[list]) -> list:
    """The one sequence of each prompt, where n = 1."""
    return [generation for (generation,) in groups]


def expected_positions(tokens: str, prompt_length: int, num_generated: int) -> list[int]:
    """Absolute positions of a token selection, spelled out."""
    return {
        "last_prompt": [prompt_length - 1],
        "generated": list(range(prompt_length - 1, prompt_length + num_generated - 1)),
        "prompt": list(range(prompt_length)),
        "all": list(range(prompt_length + num_generated - 1)),
    }[tokens]


def assert_states_equal_hugging_face(generations, hugging_face, plan) -> None:
    """Every layer, at every position that the plan selects, of every sequence; poolings are those of these rows."""
    for generation in generations:
        states = generation.hidden_states
        positions = expected_positions(plan.tokens, len(generation.prompt_token_ids), len(generation.token_ids))
        reference = reference_states(hugging_face, generation.prompt_token_ids + generation.token_ids)
        assert list(states.layers) == sorted({layer % len(reference) for layer in plan.layers})
        if plan.pooling == "none":
            assert states.positions.tolist() == positions
        for layer in states.layers:
            rows = reference[layer][positions]
            if plan.pooling != "none":
                rows = rows.mean(dim=0, keepdim=True) if plan.pooling == "mean" else rows[-1:]
            assert relative_error(states.layer(layer), rows) < 1e-4, (layer, plan)


@cache
def text_token_ids() -> list[int]:
    """Token ids of SmolLM2's tokenizer for a text of some thousand tokens."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path())
    return tokenizer(" ".join(load_world_facts()["question"]))["input_ids"]


def random_prompts(lengths, seed: int = 0) -> list[list[int]]:
    """Pieces of a text, of these lengths in tokens, from random places.

    Not random token ids: on those the model itself is ill-conditioned at single positions, where Hugging Face in
    float32 is up to 1e-4 away from Hugging Face in float64.
    """
    token_ids = text_token_ids()
    starts = np.random.default_rng(seed).integers(0, len(token_ids) - max(lengths), size=len(lengths))
    return [token_ids[start : start + length] for start, length in zip(starts.tolist(), lengths, strict=True)]


def states_like(values: np.ndarray, num_hidden_layers: int = 4):
    """HiddenStates whose layer 2 has these vectors as its last prompt tokens, one sequence a row."""
    from polygraph_hs import HiddenStates

    return [
        HiddenStates(
            torch.as_tensor(row)[None, None].expand(num_hidden_layers + 1, 1, -1),
            tuple(range(num_hidden_layers + 1)),
            np.array([2]),
            prompt_length=3,
            num_generated=1,
            num_hidden_layers=num_hidden_layers,
            tokens="last_prompt",
            pooling="none",
        )
        for row in np.asarray(values)
    ]


def drop_a_row(worker) -> None:
    """Let the recorder lose the second row of the next step."""
    recorder = worker.capture.recorder
    record = recorder.record

    def record_all_but_one(layout, layers, gather):
        record(layout, layers, gather)
        chunk = recorder.chunks[-1]
        kept = torch.arange(len(chunk.positions)) != 1
        chunk.values = chunk.values[:, kept]
        chunk.owners, chunk.positions, chunk.live = (
            array[kept.numpy()] for array in (chunk.owners, chunk.positions, chunk.live)
        )
        recorder.record = record

    recorder.record = record_all_but_one


def held(engine) -> dict[str, int]:
    """What the only worker of an engine keeps at the moment."""
    (reply,) = engine.llm.collective_rpc("capture_held")
    return reply


def parcel_of(pool: SegmentPool, *groups: Collected) -> Parcel:
    """A parcel with copies of these groups."""
    parcel = Parcel(new_token(), pool)
    for group in groups:
        values = parcel.empty(tuple(group.values.shape), group.values.dtype)
        parcel.add(replace(group, values=values.copy_(group.values)))
    return parcel
