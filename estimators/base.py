"""The one base class of the estimators: features, checks, saving and lm-polygraph's interface."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from lm_polygraph.estimators.estimator import Estimator
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from sklearn.exceptions import NotFittedError

from polygraph_hs.spec import CapturePlan, as_layers, check_pooling, check_tokens
from polygraph_hs.states import HiddenStates

ARRAYS_FILE = "arrays.safetensors"
CONFIG_FILE = "estimator.json"
FORMAT = "polygraph-hs estimator 1"


class HiddenStatesEstimator(Estimator):
    """An uncertainty score read off the hidden states of a sequence.

    Args:
        layer: the layer to read, or several whose features are joined; negative indices count from the end.
        tokens: token selection, see :class:`polygraph_hs.CapturePlan`.
        pooling: ``mean`` or ``last``, how several tokens become one feature vector. ``last_prompt`` has one token.

    Learned attributes, set by :meth:`fit`:
        hidden_size_: width of the states it was fitted on.
        layers_: their non-negative layer indices.
        num_hidden_layers_: depth of the model they came from.

    Subclasses implement ``_fit(features, wrong)`` and ``_score(features)``, and name in ``ARRAYS`` and ``PARAMETERS``
    the learned arrays and the constructor's arguments to save.
    """

    ARRAYS: ClassVar[tuple[str, ...]] = ()
    PARAMETERS: ClassVar[tuple[str, ...]] = ("layer", "tokens", "pooling")
    NEEDS_LABELS: ClassVar[bool] = False

    def __init__(self, layer: int | Sequence[int] = -1, tokens: str = "last_prompt", pooling: str = "last"):
        super().__init__(["hidden_states"], "sequence")
        self.layer = layer if hasattr(layer, "__index__") else list(layer)
        self.tokens = check_tokens(tokens)
        self.pooling = check_pooling(pooling)
        if pooling == "none":
            raise ValueError(
                f"pooling='none' leaves {type(self).__name__} with several vectors a sequence; choose 'mean' or 'last'"
            )

    @property
    def plan(self) -> CapturePlan:
        """What has to be captured for this estimator."""
        return CapturePlan(as_layers(self.layer), self.tokens)

    @property
    def is_fitted(self) -> bool:
        return hasattr(self, "hidden_size_")

    def __str__(self) -> str:
        layers = ",".join(str(layer) for layer in as_layers(self.layer))
        pooling = "" if self.tokens == "last_prompt" else f", {self.pooling}"
        return f"{type(self).__name__} (layer {layers}, {self.tokens}{pooling})"

    def features(self, states: Sequence[HiddenStates]) -> np.ndarray:
        """Feature matrix, float32 ``(n, hidden_size * number of layers)``.

        Raises:
            ValueError: no states, a NaN or infinite value, or states that this fitted estimator is not for.
            LayerNotTappedError, IncompleteCaptureError: the layer or the tokens were not captured.
        """
        if len(states) == 0:
            raise ValueError(f"{type(self).__name__} got no hidden states; give at least one sequence")
        if self.is_fitted:
            self.check_model(states[0].hidden_size, states[0].num_hidden_layers)
        rows = [
            torch.cat([state.select(layer, self.tokens, self.pooling).float() for layer in as_layers(self.layer)])
            for state in states
        ]
        matrix = torch.stack(rows).numpy()
        bad = np.flatnonzero(~np.isfinite(matrix).all(axis=1))
        if len(bad):
            raise ValueError(
                f"the hidden states of {len(bad)} of {len(states)} sequences have NaN or infinite values (sequences "
                f"{bad[:10].tolist()}, layer {self.layer}); remove these sequences, or run the model in bfloat16 or "
                f"float32 if float16 overflowed"
            )
        return matrix

    def check_model(self, hidden_size: int, num_hidden_layers: int) -> None:
        """Raise ValueError if this estimator was fitted on states of another model shape."""
        if not self.is_fitted:
            return
        fitted = (self.hidden_size_, self.num_hidden_layers_)
        if fitted != (hidden_size, num_hidden_layers):
            raise ValueError(
                f"this {type(self).__name__} was fitted on layer {self.layers_} of a model of hidden size {fitted[0]} "
                f"and {fitted[1]} layers; these states have hidden size {hidden_size} and {num_hidden_layers} layers. "
                f"Fit it on states of this model"
            )

    def fit(self, states: Sequence[HiddenStates], wrong: Sequence[bool] | np.ndarray | None = None):
        """Learn from training sequences.

        Args:
            states: the n training sequences' states.
            wrong: n labels, 1 or True where the answer is wrong. Only estimators with labels use them.

        Returns:
            self

        Raises:
            ValueError: labels missing, of another length, other than 0 and 1, or of one class; states as in
                :meth:`features`. What was fitted before stays.
        """
        shape = (states[0].hidden_size, states[0].num_hidden_layers) if len(states) else None
        before = self.__dict__.copy()
        self.__dict__.pop("hidden_size_", None)
        try:
            matrix = self.features(states)
            labels = self._check_labels(wrong, len(matrix)) if self.NEEDS_LABELS else None
            self._fit(matrix, labels)
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise
        self.hidden_size_, self.num_hidden_layers_ = shape
        plan = self.plan.resolved(self.num_hidden_layers_)
        self.layers_ = list(plan.layers)
        return self

    def _check_labels(self, wrong, n: int) -> np.ndarray:
        if wrong is None:
            raise ValueError(f"{type(self).__name__} learns from labels; give wrong=, one label a sequence (1 = wrong)")
        labels = np.asarray(wrong)
        if labels.shape != (n,):
            raise ValueError(f"wrong has shape {labels.shape}, and there are {n} sequences; give one label a sequence")
        values = set(np.unique(labels).tolist())
        if not values <= {0, 1}:
            raise ValueError(f"wrong has the values {sorted(values)}; allowed are 0 (right) and 1 (wrong)")
        if len(values) < 2:
            raise ValueError(
                f"all {n} labels are {int(labels[0])}; {type(self).__name__} learns from right and wrong answers"
            )
        return labels.astype(np.int64)

    def score(self, states: Sequence[HiddenStates]) -> np.ndarray:
        """Uncertainties, float64 ``(n,)``, higher is more uncertain, always finite.

        Raises:
            sklearn.exceptions.NotFittedError: :meth:`fit` or :meth:`load` has not been called.
            ValueError: as in :meth:`features`.
        """
        self._require_fitted()
        scores = np.asarray(self._score(self.features(states)), dtype=np.float64)
        if not np.isfinite(scores).all():
            raise ValueError(f"{self} gave non-finite scores for sequences {np.flatnonzero(~np.isfinite(scores))[:10]}")
        return scores

    def __call__(self, stats: dict) -> np.ndarray:
        """lm-polygraph's interface: score ``stats["hidden_states"]``."""
        return self.score(stats["hidden_states"])

    def _require_fitted(self) -> None:
        if not self.is_fitted:
            raise NotFittedError(
                f"{self} is not fitted; call fit(states, wrong) first, or load a saved one with "
                f"{type(self).__name__}.load(folder)"
            )

    @abstractmethod
    def _fit(self, features: np.ndarray, wrong: np.ndarray | None) -> None:
        """Learn from float32 ``(n, d)`` features and, with NEEDS_LABELS, int64 ``(n,)`` labels."""

    @abstractmethod
    def _score(self, features: np.ndarray) -> np.ndarray:
        """Score float32 ``(n, d)`` features."""

    def save(self, folder: str | Path) -> None:
        """Write the fitted estimator to a folder: its arrays as safetensors, everything else as JSON."""
        self._require_fitted()
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in self.ARRAYS}
        config = {
            "format": FORMAT,
            "class": type(self).__name__,
            "parameters": {name: getattr(self, name) for name in self.PARAMETERS},
            "hidden_size": self.hidden_size_,
            "num_hidden_layers": self.num_hidden_layers_,
            "layers": self.layers_,
            "arrays": {name: [str(array.dtype), list(array.shape)] for name, array in arrays.items()},
        }
        save_file(arrays, folder / ARRAYS_FILE)
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")

    @classmethod
    def load(cls, folder: str | Path):
        """Read a saved estimator of this class.

        Raises:
            FileNotFoundError: the folder has no saved estimator.
            ValueError: a file is truncated or foreign, or holds an estimator of another class.
        """
        folder = Path(folder)
        for name in (CONFIG_FILE, ARRAYS_FILE):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder / name} does not exist; {folder} must be a folder written by save()")
        try:
            config = json.loads((folder / CONFIG_FILE).read_text())
        except ValueError as error:
            raise ValueError(
                f"{folder / CONFIG_FILE} is not readable JSON ({error}); save the estimator again"
            ) from error
        if not isinstance(config, dict) or config.get("format") != FORMAT:
            raise ValueError(f"{folder / CONFIG_FILE} is not of the format {FORMAT!r}; it was not written by save()")
        if config.get("class") != cls.__name__:
            raise ValueError(
                f"{folder} holds a {config.get('class')}, not a {cls.__name__}; load it with its own class"
            )
        try:
            arrays = load_file(folder / ARRAYS_FILE)
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{folder / ARRAYS_FILE} is truncated or not a safetensors file ({error}); save the estimator again"
            ) from error
        found = {name: [str(array.dtype), list(array.shape)] for name, array in arrays.items()}
        if found != config["arrays"] or set(found) != set(cls.ARRAYS):
            raise ValueError(
                f"{folder / ARRAYS_FILE} holds {found}, and {CONFIG_FILE} announces {config['arrays']}; the two files "
                f"are not of the same estimator"
            )
        estimator = cls(**config["parameters"])
        for name, array in arrays.items():
            setattr(estimator, name, array)
        estimator.hidden_size_ = config["hidden_size"]
        estimator.num_hidden_layers_ = config["num_hidden_layers"]
        estimator.layers_ = config["layers"]
        if estimator.plan.resolved(estimator.num_hidden_layers_).layers != tuple(estimator.layers_):
            raise ValueError(
                f"{folder} was fitted on layers {estimator.layers_}, and its parameters name layer {estimator.layer} "
                f"of {estimator.num_hidden_layers_}; the file was changed by hand"
            )
        return estimator

    @classmethod
    def from_config(cls, config) -> HiddenStatesEstimator:
        """lm-polygraph's plug-in form: constructor arguments, or ``path`` of a saved estimator."""
        config = dict(config or {})
        path = config.pop("path", None)
        if path is None:
            return cls(**config)
        if config:
            raise ValueError(f"path={path!r} already fixes {sorted(config)}; give either a path or parameters")
        return cls.load(path)
