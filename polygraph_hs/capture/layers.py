"""Find the decoder layers of any vLLM model, and read a hidden state off what one of them returns."""

from __future__ import annotations

import dis
import inspect
import re
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class DecoderLayers:
    """The decoder blocks of a model.

    Attributes:
        path: where the list was found, for messages.
        blocks: all ``num_hidden_layers`` of them; the blocks of another pipeline stage are placeholders.
    """

    path: str
    blocks: nn.ModuleList

    def is_local(self, block: int) -> bool:
        """Whether block ``block`` (0-based) runs in this process."""
        from vllm.model_executor.models.utils import PPMissingLayer

        return not isinstance(self.blocks[block], PPMissingLayer)

    def residual_is_pending(self) -> bool | None:
        """Whether the second tensor that a block returns has yet to be added to the first; None if it cannot be told.

        What a block returns is what the next one is handed. If the blocks never read the residual they are handed,
        the first tensor alone is the state and the second a leftover.
        """
        blocks = [block for number, block in enumerate(self.blocks) if self.is_local(number)]
        answers = {_reads_residual(type(block).forward) for block in blocks}
        return answers.pop() if len(answers) == 1 else None


def _reads_residual(forward) -> bool | None:
    """Whether a block's forward uses the ``residual`` that it is handed; None if its signature does not say.

    A forward that has no such argument, or that assigns to it first, never sees the one it is handed.
    """
    forward = inspect.unwrap(forward)
    parameters = inspect.signature(forward).parameters
    if "residual" not in parameters:
        variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
        unclear = any("residual" in name or parameter.kind in variadic for name, parameter in parameters.items())
        return None if unclear else False
    for instruction in dis.get_instructions(forward):
        if not re.search("FAST|DEREF|CLOSURE", instruction.opname):
            continue
        # One instruction can stand for two, such as STORE_FAST_LOAD_FAST, and then names two variables.
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        for kind, name in zip(re.findall("LOAD|STORE|DELETE", instruction.opname), names, strict=False):
            if name == "residual":
                return kind == "LOAD"
    return False


def find_decoder_layers(model: nn.Module, num_hidden_layers: int) -> DecoderLayers:
    """Find the list of decoder blocks.

    It is the ModuleList with as many entries as the text model has hidden layers. Multimodal models are searched
    from their language model, so a vision tower of the same depth does not count.

    Raises:
        ValueError: none or several lists fit; the message lists every ModuleList that was looked at.
    """
    root, prefix = model, ""
    if callable(getattr(model, "get_language_model", None)):
        root, prefix = model.get_language_model(), "<language model>."
    lists = [(prefix + path, module) for path, module in root.named_modules() if isinstance(module, nn.ModuleList)]
    found = [DecoderLayers(path, module) for path, module in lists if len(module) == num_hidden_layers]
    if len(found) != 1:
        looked_at = ", ".join(f"{path} ({len(module)})" for path, module in lists) or "no ModuleList at all"
        raise ValueError(
            f"cannot tell which modules are the decoder layers of {type(model).__name__}: expected exactly one "
            f"ModuleList of {num_hidden_layers} entries, found {len(found)}. Looked at: {looked_at}"
        )
    return found[0]


def _flatten_batch(state: torch.Tensor, hidden_size: int, origin: str) -> torch.Tensor:
    """``(tokens, hidden_size)``; models on vLLM's Transformers backend carry a leading batch dimension of 1."""
    if state.dim() == 3 and state.shape[0] == 1:
        state = state[0]
    if state.dim() != 2 or state.shape[-1] != hidden_size:
        raise ValueError(f"{origin} is a tensor of shape {tuple(state.shape)}, expected (tokens, {hidden_size})")
    return state


def state_from_output(output, hidden_size: int, origin: str, residual_is_pending: bool | None = True) -> torch.Tensor:
    """The hidden state after a block, ``(tokens, hidden_size)``.

    vLLM's blocks return the state, ``(state,)``, ``(state, None)``, ``(update, residual)`` whose sum, not yet taken,
    is the state, or ``(state, leftover)``. The last two look alike: ``residual_is_pending`` says which it is, as
    :meth:`DecoderLayers.residual_is_pending` does.
    """
    if isinstance(output, tuple):
        state, *rest = output
        residual = rest[0] if rest else None
        if len(rest) > 1 or not isinstance(residual, torch.Tensor | None):
            raise ValueError(f"{origin} is a tuple of {len(output)}; expected (state,) or (state, residual)")
        if residual is not None:
            if residual.shape != state.shape:
                raise ValueError(
                    f"{origin} is a pair of shapes {tuple(state.shape)} and {tuple(residual.shape)}; a residual has "
                    f"the shape of the state"
                )
            if residual_is_pending is None:
                raise ValueError(
                    f"{origin} is a pair of tensors, and the blocks' forward does not tell whether their sum or the "
                    f"first alone is the state; this model cannot be captured"
                )
            if residual_is_pending:
                state = state + residual
    else:
        state = output
    if not isinstance(state, torch.Tensor):
        raise ValueError(f"{origin} is a {type(output).__name__}, expected a tensor or a pair of tensors")
    return _flatten_batch(state, hidden_size, origin)


def state_from_input(args: tuple, kwargs: dict, hidden_size: int, origin: str) -> torch.Tensor:
    """The hidden state that enters the first block: its one floating-point argument of the model's width."""
    tensors = [
        value
        for value in (*args, *kwargs.values())
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape[-1] == hidden_size
    ]
    if len(tensors) != 1:
        raise ValueError(f"{origin} has {len(tensors)} floating-point tensors of width {hidden_size}, expected one")
    return _flatten_batch(tensors[0], hidden_size, origin)
