"""Static buffers, and the hooks that fill them inside the forward pass.

A hook is tensor code only, so it is traced into the compiled forward and recorded into the CUDA graphs; in eager
mode the same hook simply runs. Nothing here reads a buffer back during the forward.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from polygraph_hs.capture.layers import DecoderLayers, state_from_input, state_from_output

# A buffer row that still holds this in every element was not written. Exact in bfloat16, float16 and float32.
CANARY = -12288.0


class Tap:
    """Writes the hidden states of chosen layers into static buffers, one row a token of the step.

    Args:
        model: the model as the runner calls it; its output is the state after the final norm.
        decoder: the model's decoder blocks.
        hidden_size, dtype, device: of the model.
        max_tokens: rows of a buffer, the most tokens a step can have, padding included.
        is_last_stage: whether this process runs the final norm.
    """

    def __init__(
        self,
        model: nn.Module,
        decoder: DecoderLayers,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        max_tokens: int,
        is_last_stage: bool = True,
    ):
        self.model = model
        self.decoder = decoder
        self.num_hidden_layers = len(decoder.blocks)
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.device = device
        self.max_tokens = max_tokens
        self.is_last_stage = is_last_stage
        self._taps: dict[int, tuple[nn.Module, str, torch.utils.hooks.RemovableHandle]] = {}
        # Every layer's buffer is a part of this, so that one gather takes the rows of all.
        self._block = torch.empty(0, max_tokens, hidden_size, dtype=dtype, device=device)

    @property
    def layers(self) -> tuple[int, ...]:
        """The tapped layers of this process, ascending."""
        return tuple(sorted(self._taps))

    def is_local(self, layer: int) -> bool:
        """Whether this process computes the layer (other pipeline stages compute the others)."""
        if layer == self.num_hidden_layers:
            return self.is_last_stage
        return self.decoder.is_local(max(layer - 1, 0))

    def set_layers(self, layers: Iterable[int]) -> None:
        """Tap exactly these layers (non-negative indices) out of those that run in this process."""
        wanted = tuple(sorted({layer for layer in layers if self.is_local(layer)}))
        if wanted == self.layers:
            return
        for module, name, handle in self._taps.values():
            handle.remove()
            delattr(module, name)
        shape = (len(wanted), self.max_tokens, self.hidden_size)
        self._block = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self._taps = {layer: self._install(layer, rows) for layer, rows in zip(wanted, self._block, strict=True)}

    def _install(self, layer: int, rows: torch.Tensor) -> tuple[nn.Module, str, torch.utils.hooks.RemovableHandle]:
        module = self.model if layer == self.num_hidden_layers else self.decoder.blocks[max(layer - 1, 0)]
        name = f"polygraph_hs_layer_{layer}"
        hidden_size = self.hidden_size
        # A module's own buffer, so the compiled graph treats it like a weight: an input with a fixed address. Through
        # DLPack it has a storage of its own: the compiler would take views of one storage for inputs that overlap.
        module.register_buffer(name, torch.from_dlpack(rows), persistent=False)

        def write(module: nn.Module, state: torch.Tensor) -> None:
            getattr(module, name)[: state.shape[0]].copy_(state)

        if layer == 0:

            def before_block(module, args, kwargs):
                write(
                    module,
                    state_from_input(args, kwargs, hidden_size, "the input of the first decoder layer"),
                )

            handle = module.register_forward_pre_hook(before_block, with_kwargs=True)
        else:
            origin = f"the output behind layer {layer}"
            pending = self.decoder.residual_is_pending()

            def after_block(module, args, output):
                write(module, state_from_output(output, hidden_size, origin, pending))

            handle = module.register_forward_hook(after_block)
        return module, name, handle

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Copy rows of the last step's buffers.

        Args:
            rows: int64 ``(num_rows,)`` on the model's device.

        Returns:
            ``(len(self.layers), num_rows, hidden_size)`` on the model's device.
        """
        return self._block.index_select(1, rows)

    def set_canary(self, num_rows: int) -> None:
        """Overwrite the first rows with a value no forward pass writes, to see later whether they were written."""
        self._block[:, :num_rows].fill_(CANARY)

    def unwritten_layers(self, num_rows: int) -> tuple[int, ...]:
        """Layers whose first ``num_rows`` rows were not all written since :meth:`set_canary`."""
        unwritten = (self._block[:, :num_rows] == CANARY).all(dim=-1).any(dim=-1).tolist()
        return tuple(layer for layer, is_unwritten in zip(self.layers, unwritten, strict=True) if is_unwritten)
