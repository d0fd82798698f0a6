"""HiddenStates: the captured states of one sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from polygraph_hs.errors import IncompleteCaptureError, LayerNotTappedError
from polygraph_hs.spec import check_pooling, check_tokens, resolve_layer, token_span

POOLED_POSITION = -1


@dataclass(frozen=True, eq=False, repr=False)
class HiddenStates:
    """The captured states of one sequence of P prompt and G generated tokens.

    Attributes:
        values: tensor ``(layers, tokens, hidden_size)`` on the CPU, in the model's dtype (float32 for
            ``pooling="mean"``). The sequences of a call share one memory that lives as long as any of them.
        layers: tuple of non-negative layer indices, ascending, one a row of ``values``.
        positions: int64 array ``(tokens,)``, the absolute position of each column; -1 for a mean.
        prompt_length: P.
        num_generated: G.
        num_hidden_layers: decoder blocks of the model, to which negative layer indices refer.
        tokens: the token selection that was captured.
        pooling: the pooling that was applied.
    """

    values: torch.Tensor
    layers: tuple[int, ...]
    positions: np.ndarray
    prompt_length: int
    num_generated: int
    num_hidden_layers: int
    tokens: str
    pooling: str

    def __repr__(self) -> str:
        layers, tokens, hidden_size = self.values.shape
        return (
            f"HiddenStates({layers} layers {list(self.layers)}, {tokens} tokens ({self.tokens}, pooling "
            f"{self.pooling}), hidden size {hidden_size}, {self.values.dtype}, prompt {self.prompt_length} + "
            f"generated {self.num_generated})"
        )

    @property
    def hidden_size(self) -> int:
        return self.values.shape[-1]

    def layer(self, layer: int) -> torch.Tensor:
        """The states of one layer, ``(tokens, hidden_size)``.

        Raises:
            ValueError: the model has no such layer.
            LayerNotTappedError: the layer was not captured.
        """
        index = resolve_layer(layer, self.num_hidden_layers)
        if index not in self.layers:
            raise LayerNotTappedError(
                f"layer={layer} was not captured; this sequence has layers {list(self.layers)}. Name it in layers=, "
                f"or call model.install(estimator) before generating"
            )
        return self.values[self.layers.index(index)]

    def select(self, layer: int, tokens: str | None = None, pooling: str = "none") -> torch.Tensor:
        """Features of one layer.

        Args:
            layer: layer index, negative ones count from the end.
            tokens: a token selection that the captured one contains; by default the captured one.
            pooling: ``none`` gives ``(tokens, hidden_size)``, ``mean`` (float32) and ``last`` give
                ``(hidden_size,)``.

        Raises:
            ValueError: an argument does not exist for this model.
            LayerNotTappedError: the layer was not captured.
            IncompleteCaptureError: the token selection or pooling asks for states that were not captured.
        """
        tokens = self.tokens if tokens is None else check_tokens(tokens)
        check_pooling(pooling)
        states = self.layer(layer)
        if self.pooling != "none":
            if (tokens, pooling) != (self.tokens, self.pooling):
                raise IncompleteCaptureError(
                    f"tokens={tokens!r}, pooling={pooling!r} cannot be had from states captured with tokens="
                    f"{self.tokens!r}, pooling={self.pooling!r}; capture with pooling='none'"
                )
            return states[0]
        start, stop = token_span(tokens, self.prompt_length, self.num_generated)
        columns = np.flatnonzero((self.positions >= start) & (self.positions < stop))
        if len(columns) != stop - start:
            raise IncompleteCaptureError(
                f"tokens={tokens!r} means positions {start} to {stop - 1}, and tokens={self.tokens!r} was captured; "
                f"capture with tokens={tokens!r} or tokens='all'"
            )
        selected = states[columns[0] : columns[-1] + 1]
        if pooling == "mean":
            return selected.float().mean(dim=0)
        return selected[-1] if pooling == "last" else selected
