"""Finding decoder layers and reading their outputs, on plain modules of every form vLLM has."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from polygraph_hs.capture.layers import (
    DecoderLayers,
    find_decoder_layers,
    state_from_input,
    state_from_output,
)
from polygraph_hs.capture.tap import Tap

STATE, RESIDUAL = torch.randn(5, 8), torch.randn(5, 8)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (STATE, STATE),
        ((STATE, RESIDUAL), STATE + RESIDUAL),
        ((STATE, None), STATE),
        ((STATE,), STATE),
        (STATE[None], STATE),
        ((STATE[None],), STATE),
    ],
)
def test_every_form_of_layer_output_gives_the_residual_stream(output, expected):
    assert torch.equal(state_from_output(output, 8, "layer 1"), expected)


def test_a_leftover_beside_the_state_is_not_added():
    assert torch.equal(state_from_output((STATE, RESIDUAL), 8, "layer 1", residual_is_pending=False), STATE)


def test_a_pair_that_could_be_either_is_an_error():
    with pytest.raises(ValueError, match="layer 1 is a pair of tensors, and the blocks' forward does not tell"):
        state_from_output((STATE, RESIDUAL), 8, "layer 1", residual_is_pending=None)
    assert torch.equal(state_from_output((STATE, None), 8, "layer 1", residual_is_pending=None), STATE)


class AddsWhatItIsHanded(nn.Module):
    def forward(self, positions, hidden_states, residual):
        residual = hidden_states if residual is None else residual + hidden_states
        return residual * 2, residual


class ReplacesWhatItIsHanded(nn.Module):
    def forward(self, positions, hidden_states, residual):
        residual = hidden_states
        hidden_states, residual = hidden_states * 2, residual
        return residual + hidden_states, residual


class IsHandedNothing(nn.Module):
    def forward(self, positions, hidden_states):
        residual = hidden_states
        return residual + hidden_states * 2, residual


class TakesAnything(nn.Module):
    def forward(self, *args, **kwargs):
        return args[0], kwargs["residual"]


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([AddsWhatItIsHanded, AddsWhatItIsHanded], True),
        ([ReplacesWhatItIsHanded, ReplacesWhatItIsHanded], False),
        ([ReplacesWhatItIsHanded, IsHandedNothing], False),
        ([TakesAnything], None),
        ([AddsWhatItIsHanded, IsHandedNothing], None),
    ],
)
def test_a_residual_is_pending_if_the_next_block_reads_it(blocks, expected):
    assert DecoderLayers("layers", nn.ModuleList(block() for block in blocks)).residual_is_pending() is expected


@pytest.mark.parametrize("output", [(STATE, RESIDUAL[:2]), (STATE, STATE, STATE), "text", STATE[:, :4], (STATE, "x")])
def test_an_unknown_form_of_layer_output_is_an_error(output):
    with pytest.raises(ValueError, match="layer 1 is a"):
        state_from_output(output, 8, "layer 1")


def test_the_embedding_output_is_the_one_state_that_enters_the_first_block():
    positions = torch.arange(5)
    assert torch.equal(state_from_input((positions, STATE, None), {}, 8, "input"), STATE)
    assert torch.equal(state_from_input((STATE[None],), {"position_ids": positions}, 8, "input"), STATE)
    with pytest.raises(ValueError, match="has 2 floating-point tensors of width 8"):
        state_from_input((STATE, RESIDUAL), {}, 8, "input")


class Network(nn.Module):
    def __init__(self, towers: dict[str, int]):
        super().__init__()
        for name, depth in towers.items():
            setattr(self, name, nn.ModuleList(nn.Linear(8, 8) for _ in range(depth)))

    def forward(self, states):
        for layer in self.layers:
            states = layer(states)
        return states * 2


def test_the_list_with_one_entry_a_hidden_layer_is_found():
    assert find_decoder_layers(Network({"layers": 3, "experts": 4}), 3).path == "layers"


@pytest.mark.parametrize("towers", [{"experts": 4}, {"layers": 3, "others": 3}, {}])
def test_layers_that_cannot_be_told_are_an_error_listing_what_was_looked_at(towers):
    with pytest.raises(ValueError, match="expected exactly one ModuleList of 3 entries") as error:
        find_decoder_layers(Network(towers), 3)
    assert all(f"{name} ({depth})" in str(error.value) for name, depth in towers.items())


@pytest.fixture
def tapped():
    network = Network({"layers": 3})
    tap = Tap(network, DecoderLayers("layers", network.layers), 8, torch.float32, torch.device("cpu"), 16)
    return network, tap


def test_a_tap_writes_embeddings_blocks_and_the_final_state(tapped):
    network, tap = tapped
    tap.set_layers([0, 1, 3])
    with torch.no_grad():
        output = network(STATE)
        expected = torch.stack([STATE, network.layers[0](STATE), output])
    assert torch.equal(tap.gather(torch.tensor([4, 0])), expected[:, [4, 0]])


def test_a_removed_tap_leaves_nothing_behind(tapped):
    network, tap = tapped
    tap.set_layers([0, 1, 2, 3])
    tap.set_layers([2])
    assert tap.layers == (2,)
    assert [name for name, _ in network.named_buffers()] == ["layers.1.polygraph_hs_layer_2"]
    assert sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in network.modules()) == 1


def test_a_hook_that_does_not_fire_is_noticed(tapped):
    network, tap = tapped
    tap.set_layers([1, 2])
    tap.set_canary(5)
    network.layers[0](STATE)
    assert tap.unwritten_layers(5) == (2,)
    tap.set_canary(5)
    with torch.no_grad():
        network(STATE)
    assert tap.unwritten_layers(5) == ()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("use_ubatching", True, "micro-batches"),
        ("prefill_context_parallel_size", 2, "prefill_context_parallel_size"),
        ("kv_sharing_fast_prefill", True, "kv_sharing_fast_prefill"),
        ("distributed_executor_backend", "external_launcher", "distributed_executor_backend='external_launcher'"),
        ("distributed_executor_backend", "ray", "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0"),
    ],
)
def test_options_with_which_rows_would_be_missed_are_refused(option, value, message, monkeypatch):
    from polygraph_hs.capture.worker import require_capturable

    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")

    def config(**options):
        values = {
            "use_ubatching": False,
            "prefill_context_parallel_size": 1,
            "kv_sharing_fast_prefill": False,
            "distributed_executor_backend": "mp",
            **options,
        }
        return SimpleNamespace(parallel_config=SimpleNamespace(**values), cache_config=SimpleNamespace(**values))

    require_capturable(config())
    with pytest.raises(NotImplementedError, match=f"cannot be captured with {message} "):
        require_capturable(config(**{option: value}))
