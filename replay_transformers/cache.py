"""`ReplayCache`: a transformers cache whose state-space layers keep recent inputs instead of rewriting their state."""

import copy
import weakref
from itertools import zip_longest
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from replay_transformers.attention import EmptyLayer, FixedAttentionLayer, GrowingAttentionLayer
from replay_transformers.config import ReplayConfig
from replay_transformers.cursor import Cursor
from replay_transformers.geometry import attention_shape, layer_geometries, text_config
from replay_transformers.layers import LAYER_CLASSES, ReplayLayer
from replay_transformers.rollback import rejected_tokens
from replay_transformers.rows import RowsOfCache

__all__ = ["ReplayCache"]

ALIGNMENT = 8  # of the slots of attention: masks of other widths are copied by the attention kernels


class ReplayCache(RowsOfCache, Cache):
    """A cache for hybrid state-space models: per state-space layer a checkpoint and a ring of recent inputs.

    A plain decode step reads the checkpoint once and writes only the token's inputs; every ``window`` steps a flush
    folds the ring into the checkpoint. By default every forward is committed at once. After `activate_past_recording`
    the last ``max_draft`` tokens stay uncommitted until `crop` says how many of them to reject, by moving a pointer.

    Args:
        config: the model's configuration (`model.config`).
        replay_config: settings; None gives `ReplayConfig()`.
        max_cache_len: tokens the attention layers can hold. Given, every shape is fixed (for compiled decoding and
            CUDA graphs); None, the attention layers grow.

    Raises:
        ValueError: arguments of the wrong type or range.
        NotImplementedError: a model family or layer type that the replay cache does not know.

    Example:
        ```python
        import torch
        from transformers import AutoModelForCausalLM
        import replay_transformers as rt

        model = AutoModelForCausalLM.from_pretrained(rt.sample_model("nemotron_h"))
        cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=8))
        with rt.enable():
            model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, cache=cache)  # past_key_values= before 5.24
        assert cache.get_seq_length() == 3 + 4 - 1  # the last token has not been fed yet
        ```
    """

    def __init__(
        self, config: Any, replay_config: ReplayConfig | None = None, max_cache_len: int | None = None
    ) -> None:
        if replay_config is None:
            replay_config = ReplayConfig()
        if not isinstance(replay_config, ReplayConfig):
            hint = ": write ReplayConfig(**settings)" if isinstance(replay_config, dict) else ""
            raise ValueError(f"replay_config must be a ReplayConfig or None, got {type(replay_config).__name__}{hint}")
        if max_cache_len is not None and (
            isinstance(max_cache_len, bool) or not isinstance(max_cache_len, int) or max_cache_len < 1
        ):
            raise ValueError(f"max_cache_len must be a positive int or None, got {max_cache_len!r}")
        self.replay_config = replay_config
        self._max_cache_len = max_cache_len
        self.geometries = layer_geometries(config)
        self._key_value_heads, self._head_dim = attention_shape(config)
        self.cursor = Cursor(replay_config)
        self.input_device: torch.device | None = None  # of the latest forward: where positions are counted
        # the configuration that was last found to fit, and its number of layers
        self._fits: tuple[weakref.ref[Any] | None, int] = (None, 0)
        with torch.inference_mode(False), torch.no_grad():  # counters of fixed layers outlive the mode, too
            super().__init__(layers=self._build_layers())

    def _build_layers(self) -> list[Any]:
        total = sum(geometry.kind in LAYER_CLASSES for geometry in self.geometries)
        layers: list[Any] = []
        before, attention = 0, list[Any]()
        for geometry in self.geometries:
            place: dict[str, Any] = {"cursor": self.cursor, "before": before, "total": total}
            if geometry.kind in LAYER_CLASSES:
                layer_class = LAYER_CLASSES[geometry.kind]
                layers.append(layer_class(geometry, self.replay_config, self.cursor, before, total, attention))
                before, attention = before + 1, []
            elif geometry.kind == "none":
                layers.append(EmptyLayer())
            else:
                if self.max_cache_len is None:
                    attention.append(GrowingAttentionLayer(**place))
                else:
                    attention.append(FixedAttentionLayer(max_cache_len=self._slots(), **place))
                layers.append(attention[-1])
        return layers

    def _slots(self) -> int:
        """Slots of fixed attention layers: also a row that is full can take part in a forward that it then rejects."""
        assert self.max_cache_len is not None
        return -(-(self.max_cache_len + self.replay_config.max_step) // ALIGNMENT) * ALIGNMENT

    def check_model(self, config: Any) -> None:
        """Raise ValueError unless the cache fits a model with this configuration. Changes nothing."""
        fits, layers = self._fits
        if fits is not None and fits() is config and layers == text_config(config).num_hidden_layers:
            return
        geometries = layer_geometries(config)
        if geometries != self.geometries:
            pairs = zip_longest(self.geometries, geometries)
            index, (mine, its) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
            raise ValueError(
                f"this replay cache belongs to another model: its layer {index} is {mine}, the model's is {its}; build "
                "one with ReplayCache(model.config)"
            )
        self._fits = (weakref.ref(config), len(geometries))

    def check_forward(self, rows: int, tokens: int) -> None:
        """Raise ValueError unless a forward of ``tokens`` tokens in ``rows`` rows may begin. Changes nothing.

        Whether fixed shapes have room is not asked for single tokens on a GPU, where it would stall every step.
        """
        self._require_between_forwards("begin a forward")
        if rows < 1 or tokens < 1:
            hint = ""
            if not self.cursor.fresh:
                hint = (
                    f": the cache holds {int(self.cursor.lengths().max())} tokens, so pass more than those, or call "
                    "reset() to begin anew"
                )
            raise ValueError(f"a forward needs at least one row and one new token, got {rows} rows of {tokens}{hint}")
        if not self.cursor.fresh and rows != self.batch_size:
            raise ValueError(self.cursor.mismatch(f"{rows} rows"))
        if self.max_cache_len is None:
            return
        seen = self.cursor.lengths() if not self.cursor.fresh else None
        if self.cursor.ragged:
            if self.cursor.longest + tokens > self._slots():
                raise ValueError(
                    f"{self.cursor.longest} tokens in the longest row of the cache and {tokens} new ones exceed "
                    f"max_cache_len={self.max_cache_len}: build a larger ReplayCache, or without max_cache_len"
                )
            return
        if seen is not None and seen.is_cuda and tokens == 1:
            return
        length = 0 if seen is None else int(seen.max())
        if length + tokens > self.max_cache_len:
            raise ValueError(
                f"{length} tokens in the cache and {tokens} new ones exceed max_cache_len={self.max_cache_len}: build "
                "a larger ReplayCache, or without max_cache_len"
            )

    def note_broken_forward(self, forwards_before: int) -> None:
        """Take note that a forward raised, unless no layer had taken anything in yet.

        Args:
            forwards_before: ``cursor.forwards`` as the forward began.
        """
        self.cursor.broken |= self.cursor.plan is not None or self.cursor.forwards != forwards_before
        self.cursor.note_apart(self.attention_layers)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_fits": (None, 0)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if torch.is_inference_mode_enabled():  # what was just loaded could not be updated outside of it
            with torch.inference_mode(False), torch.no_grad():
                state = copy.deepcopy(state)
        self.__dict__.update(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ReplayCache":
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        with torch.inference_mode(False), torch.no_grad():
            new.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return new

    def __repr__(self) -> str:
        kind = "growing" if self.max_cache_len is None else f"max_cache_len={self.max_cache_len}"
        return f"ReplayCache({len(self.layers)} layers, {self.replay_config}, {kind})"

    def allocate(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make the buffers of the state-space layers, and of attention if its shapes are fixed, ahead of a forward.

        Without it every layer allocates at its first forward, on the device of its input. A forward that is compiled
        from the first token on needs them to be there.

        Args:
            rows: batch rows. dtype: dtype of the model's activations. device: the one device of the whole model.

        Raises:
            ValueError: the cache holds tokens already.
        """
        if not self.cursor.fresh:
            raise ValueError("the cache holds tokens already: allocate before the first forward, or reset() first")
        self.cursor.allocate(rows, device)
        for layer in self.replay_layers:
            layer.allocate(rows, dtype, device)
        for layer in self.attention_layers:
            if isinstance(layer, FixedAttentionLayer):
                empty = torch.empty(rows, self._key_value_heads, 0, self._head_dim, dtype=dtype, device=device)
                layer.lazy_initialization(empty, empty)

    @property
    def replay_layers(self) -> list[ReplayLayer]:
        """The state-space layers, in order."""
        return [layer for layer in self.layers if isinstance(layer, ReplayLayer)]

    @property
    def attention_layers(self) -> list[Any]:
        """The attention layers, in order."""
        return [layer for layer in self.layers if isinstance(layer, CacheLayerMixin)]

    @property
    def max_cache_len(self) -> int | None:  # a read-only property of `Cache` itself before transformers 5.20
        """Tokens the cache can hold if its shapes are fixed, else None."""
        return self._max_cache_len

    @property
    def batch_size(self) -> int:
        """Rows in the cache, or -1 before the first forward."""
        return self.cursor.batch_size

    @property
    def is_compileable(self) -> bool:
        """Whether all shapes are fixed."""
        return self.max_cache_len is not None

    @property
    def is_linear(self) -> list[bool]:
        """All False: in a replay cache every layer knows how many tokens it has seen.

        transformers uses the property to tell caches without a length, whose prompts it cannot slice.
        """
        return [False] * len(self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Tokens seen, padding and uncommitted tokens included; the same for every layer between two forwards.

        Where the rows have seen different numbers of tokens, the largest; `row_lengths` has them all.

        Returns:
            An int; a 0-d int64 tensor if the shapes are fixed, as in `StaticCache`, on the device of the model's input.
        """
        if self.cursor.fresh:
            return 0
        attention = self.attention_layers
        if attention and attention[0].is_initialized and not self.cursor.ragged:
            length = attention[0].get_seq_length()
        else:
            length = self.cursor.lengths().max()
        if not self.is_compileable:
            return int(length)
        return length if self.input_device is None else length.to(self.input_device)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """``(kv_length, kv_offset)`` of the attention mask for ``query_length`` new tokens."""
        if self.max_cache_len is not None:
            return self._slots(), 0
        if self.cursor.ragged:
            held = max((layer.keys.shape[2] for layer in self.attention_layers), default=0)
            return max(held, self.cursor.width(query_length)), 0
        return self.get_seq_length() + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Tokens the cache can hold; -1 without a limit."""
        return -1 if self.max_cache_len is None else self.max_cache_len

    def state(self, layer_idx: int) -> torch.Tensor:
        """The recurrent state of a layer as if updated eagerly, uncommitted tokens included. Changes nothing.

        Args:
            layer_idx: index among all layers of the model.

        Returns:
            float32 (float64 for float64 models), in transformers' layout: ``[B, heads, head_dim, state]`` for
            Mamba-2, ``[B, heads, key_dim, value_dim]`` for Gated DeltaNet.

        Raises:
            ValueError: not a state-space layer, or nothing seen yet.
        """
        layer = self.layers[layer_idx] if 0 <= layer_idx < len(self.layers) else None
        if not isinstance(layer, ReplayLayer):
            known = [i for i, layer in enumerate(self.layers) if isinstance(layer, ReplayLayer)]
            raise ValueError(f"layer {layer_idx} has no recurrent state; state-space layers are {known}")
        if self.cursor.fresh or layer.checkpoint is None:
            raise ValueError("the cache has not seen any tokens yet")
        self._require_between_forwards("read a state")
        return layer.state()

    def check_finite(self) -> None:
        """Raise ValueError if a checkpoint or a copy of it holds a value that is not finite. Waits for the device.

        Formats of several tensors store what is not finite as NaN, so that it shows in every output; this says where.
        """
        self._require_between_forwards("check a state")
        found = [
            f"layer {index}, {name}, rows {rows}"
            for index, layer in enumerate(self.layers)
            if isinstance(layer, ReplayLayer)
            for name, rows in layer.rows_not_finite().items()
        ]
        if found:
            raise ValueError(
                f"the cache holds states that are not finite: {'; '.join(found)}; reset() it, and look for overflow in "
                "the model's activations, or store the state in a wider precision"
            )

    def flush(self) -> None:
        """Fold every committed record into the checkpoint, in place. Later outputs change by rounding only."""
        self._require_between_forwards("flush")
        if self.cursor.fresh:
            return
        for layer in self.replay_layers:
            layer.flush()
        self.cursor.flushed()

    def offload(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: the cache stays on the devices of its layers."""
        raise NotImplementedError(
            'a replay cache stays on the devices of its layers; use cache_implementation="offloaded" for a stock cache '
            "that does not"
        )

    prefetch = offload

    def fork(self) -> "ReplayCache":
        """An independent copy that shares no writable memory with this one."""
        self._require_between_forwards("fork")
        return copy.deepcopy(self)

    def memory_footprint(self) -> dict[str, int]:
        """Allocated bytes by kind: ``checkpoint``, ``readout``, ``ring``, ``convolution``, ``attention``."""
        sizes = dict.fromkeys(("checkpoint", "readout", "ring", "convolution", "attention"), 0)
        kinds = {"checkpoint": "checkpoint", "readout": "readout", "conv_ring": "convolution"}
        for layer in self.replay_layers:
            for name, buffer in layer.buffers().items():
                sizes[kinds.get(name.split(".")[0], "ring")] += buffer.numel() * buffer.element_size()
        for layer in self.attention_layers:
            for buffer in (layer.keys, layer.values):
                if buffer is not None:
                    sizes["attention"] += buffer.numel() * buffer.element_size()
        return sizes

    def _require_between_forwards(self, what: str) -> None:
        if self.cursor.plan is not None or self.cursor.broken:
            raise ValueError(
                f"cannot {what}: a forward through this cache broke off half-way; call reset() or build a new cache"
            )

    def activate_past_recording(self) -> None:
        """From now on keep the last ``max_draft`` tokens uncommitted until `crop` decides about them."""
        self.cursor.recording = True

    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        """Reject the last ``-tokens_to_remove`` tokens and commit the other uncommitted ones.

        Args:
            tokens_to_remove: 0 (reject none) or a negative int; or an int64 tensor ``[B]`` of such values, one per
                row. Rows then may differ in length, until `join_rows`: the next tokens of each follow its own, and
                a 2-D attention mask has a column per slot, those behind a row's tokens being of no effect.

        Raises:
            ValueError: positive values, more tokens than are uncommitted, or rejecting while not recording. Nothing is
                changed then.
        """
        self._require_between_forwards("crop")
        rejected, uniform = rejected_tokens(tokens_to_remove, self.batch_size)
        rejected = rejected.to(self.cursor.base.device) if self.cursor.base is not None else rejected
        if self.cursor.fresh:
            if uniform != 0:
                raise ValueError(f"cannot reject {rejected.tolist()} tokens: the cache has not seen any")
            return
        if uniform != 0 and not self.cursor.recording:
            raise ValueError(
                "cannot reject tokens: this cache commits every forward at once; call activate_past_recording() before "
                "the forwards that crop() should be able to undo"
            )
        _, _, pending = self.cursor.tensors()
        if uniform != 0 and bool((pending < rejected).any()):
            raise ValueError(
                f"cannot reject {rejected.tolist() if uniform is None else uniform} tokens: "
                f"only the last {int(pending.min())} are uncommitted (max_draft={self.replay_config.max_draft})"
            )
        if uniform is None:
            self.separate_rows()
        if uniform and not self.cursor.ragged:
            for layer in self.attention_layers:
                layer.crop(-uniform)
        if self.cursor.ragged:
            self.reject_rows(rejected)
        else:
            self.cursor.commit(rejected)

    def reset(self) -> None:
        """Back to an empty sequence; buffers keep their memory, recording stops."""
        super().reset()
        self.cursor.reset()
