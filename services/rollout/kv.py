"""The KV cache of the torch engine: one row per running sequence, rows kept compact.

    S slots   H key/value heads   C capacity in positions   D head size   n rows in use   L prompt length   T = kv_length

    layer i:  keys, values [S, H, C, D]      rows 0..n-1 belong to running sequences, the rest is free
              row r:  | 0 … pos[r] written | stale … |       stale positions are masked, so they must be finite

C grows in blocks as answers grow, so a large max_len costs memory only when a long answer comes.
"""

from __future__ import annotations

import itertools

import torch

BLOCK = 16
"""Attended length is a multiple of this: batched GEMMs on a CPU are up to 3 times slower at odd lengths."""


class KVCache:
    """Keys and values of all layers. The engine says before each forward pass where it writes (at_decode, at_prefill)."""

    def __init__(self, num_layers: int, slots: int, max_len: int, device: torch.device) -> None:
        self.num_layers, self.slots, self.max_len, self.device = num_layers, slots, max_len, device
        self.capacity = 0
        self._layers: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * num_layers
        self.prefilling = False
        self.num_rows = 0
        self.kv_length = 0
        """Positions a decode step attends to (some masked)."""
        self.mask_BT = torch.empty(0)
        """True where a row may attend."""
        self._pos_B = torch.empty(0, dtype=torch.long)
        self._flat: dict[tuple[int, int], torch.Tensor] = {}
        self._runs: list[tuple[int, int, int, int]] = []

    def at_decode(self, pos_B: torch.Tensor, longest: int) -> None:
        """Next: row b writes its one token at pos_B[b] and attends to 0..pos_B[b]; `longest` = max(pos_B)."""
        self.prefilling = False
        self._reserve(longest + 1)
        self.num_rows = pos_B.shape[0]
        self.kv_length = min(_ceil(longest + 1), self.capacity)
        self.mask_BT = torch.arange(self.kv_length, device=self.device) <= pos_B[:, None]
        self._pos_B = pos_B
        self._flat.clear()

    def at_prefill(self, first_row: int, copies: list[int], length: int) -> None:
        """Next: prompt i of the batch is written to the next copies[i] rows, from first_row on; positions 0..length-1."""
        self.prefilling = True
        self._reserve(length)
        self.kv_length = length
        self._runs.clear()
        prompt, row = 0, first_row
        for n, same in itertools.groupby(copies):
            prompts = len(list(same))
            self._runs.append((prompt, prompts, row, n))
            prompt, row = prompt + prompts, row + prompts * n

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores [N, H, L or 1, D] and returns what to attend to: the same in a prefill, the rows' caches in a decode step."""
        stored_keys, stored_values = self._layer(layer, keys, values)
        if self.prefilling:
            self._scatter(stored_keys, keys)
            self._scatter(stored_values, values)
            return keys, values
        self._put(stored_keys, keys)
        self._put(stored_values, values)
        n, kv = self.num_rows, self.kv_length
        return stored_keys[:n, :, :kv], stored_values[:n, :, :kv]

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Rows `source` are copied over rows `target` (disjoint). Whole rows: contiguous, so cheaper than the used part."""
        for stored in self._tensors():
            flat = stored.view(self.slots, -1)
            flat.index_copy_(0, target, flat.index_select(0, source))

    def clear(self, rows: torch.Tensor) -> None:
        """Zeroes rows that may hold NaN: stale positions are masked by weight 0, and 0 x NaN would poison the next owner."""
        for stored in self._tensors():
            stored[rows] = 0

    def _tensors(self) -> list[torch.Tensor]:
        return [t for pair in self._layers if pair is not None for t in pair]

    def _layer(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stored = self._layers[layer]
        if stored is None:
            stored = self._layers[layer] = (self._zeros(keys, self.capacity), self._zeros(values, self.capacity))
        return stored

    def _zeros(self, like: torch.Tensor, capacity: int) -> torch.Tensor:
        return torch.zeros(self.slots, like.shape[1], capacity, like.shape[3], dtype=like.dtype, device=self.device)

    def _scatter(self, stored: torch.Tensor, new: torch.Tensor) -> None:
        """One broadcast copy for each run of prompts with equally many rows."""
        for prompt, prompts, row, n in self._runs:
            rows = stored[row : row + prompts * n, :, : self.kv_length]
            rows.unflatten(0, (prompts, n)).copy_(new[prompt : prompt + prompts, None])

    def _put(self, stored: torch.Tensor, new: torch.Tensor) -> None:
        n, heads, _, size = new.shape
        shape = (heads, stored.shape[2])
        if shape not in self._flat:
            row_head = torch.arange(n * heads, device=self.device).view(n, heads)
            self._flat[shape] = (row_head * stored.shape[2] + self._pos_B[:, None]).view(-1)
        stored.view(-1, size).index_copy_(0, self._flat[shape], new.reshape(-1, size))

    def _reserve(self, length: int) -> None:
        """Makes C at least `length`; grows by half so that copying stays a small part of writing.

        If memory ends midway, some layers are larger than `capacity`; that is harmless, and everything is as before.
        """
        if length <= self.capacity:
            return
        capacity = min(_ceil(max(length, self.capacity * 3 // 2)), _ceil(self.max_len))
        for i, pair in enumerate(self._layers):
            if pair is not None:
                self._layers[i] = (self._grown(pair[0], capacity), self._grown(pair[1], capacity))
        self.capacity = capacity

    def _grown(self, old: torch.Tensor, capacity: int) -> torch.Tensor:
        new = self._zeros(old, max(capacity, old.shape[2]))
        new[:, :, : old.shape[2]] = old
        return new


def _ceil(length: int) -> int:
    return -(-length // BLOCK) * BLOCK
