# SPDX-License-Identifier: Apache-2.0
"""What rounding at random and the int8 code mean, in numpy float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np

GOLDEN = 0x9E3779B9
"""2^32 divided by the golden ratio: spreads neighbouring columns over the words."""


def mix32(x: np.ndarray) -> np.ndarray:
    """The finalizer of MurmurHash3 (Appleby), on words of 32 bits held in uint64."""
    word = np.uint64(0xFFFFFFFF)
    x = x ^ (x >> np.uint64(16))
    x = (x * np.uint64(0x85EBCA6B)) & word
    x = x ^ (x >> np.uint64(13))
    x = (x * np.uint64(0xC2B2AE35)) & word
    return x ^ (x >> np.uint64(16))


def noise_reference(rows: np.ndarray, dim: int, seed: int, step: int) -> np.ndarray:
    """Noise ``[K, dim]`` of rows ``[K]``: whole numbers in ``[0, 2^16)``, as float64."""
    word = 0xFFFFFFFF
    key = mix32(np.array((seed + GOLDEN) & word, np.uint64))
    key = mix32(key ^ np.uint64(step & word))
    row_keys = mix32(key ^ (rows.astype(np.int64).astype(np.uint64) & np.uint64(word)))
    columns = (np.arange(dim, dtype=np.uint64) * np.uint64(GOLDEN)) & np.uint64(word)
    mixed = mix32((row_keys[:, None] + columns[None, :]) & np.uint64(word))
    return (mixed >> np.uint64(16)).astype(np.float64)


def stochastic_round_bf16_reference(
    values: np.ndarray, rows: np.ndarray, seed: int, step: int
) -> np.ndarray:
    """Rounds to one of the two bfloat16 neighbours, the nearer the likelier.

    A value a share p of the way from its neighbour towards zero to the one away from zero goes
    away from zero with probability p, so that the mean is the value. The neighbour past the
    largest bfloat16 counts as 2^128, which is written as infinity. NaN stays NaN.

    Args:
        values: ``[K, D]`` float32.
        rows: ``[K]`` int32 row of the table each lies in.
        seed: of the table.
        step: of the update.

    Returns:
        ``[K, D]`` bfloat16.
    """
    with np.errstate(invalid="ignore"):  # a NaN that signals
        exact = np.abs(values.astype(np.float64))
    exponents = np.where(exact > 0, np.frexp(exact)[1] - 1, -126)
    # bfloat16 has 7 bits after the point; below 2^-126 its values lie evenly.
    spacing = np.ldexp(1.0, np.maximum(exponents, -126) - 7)
    with np.errstate(invalid="ignore"):
        inner = np.floor(exact / spacing) * spacing
        share = (exact - inner) / spacing
        away = noise_reference(rows, values.shape[1], seed, step) >= (1 - share) * 2**16
        rounded = inner + np.where(away, spacing, 0.0)
    rounded = np.where(np.isfinite(exact), rounded, exact)
    with np.errstate(over="ignore", invalid="ignore"):
        signed = np.copysign(rounded, values).astype(np.float32)
    return np.asarray(signed, ml_dtypes.bfloat16)


def quantize_int8_reference(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `quantize_int8`: 255 equal steps from each row's least to its largest value."""
    exact = values.astype(np.float64)
    finite = np.asarray(np.isfinite(exact).all(axis=1))
    low = np.where(finite, exact.min(axis=1), np.nan)
    with np.errstate(invalid="ignore"):
        scales = np.where(finite, exact.max(axis=1) - low, np.nan) / 255
    steps = np.where(scales > 0, scales, 1)
    places = np.where(finite[:, None], (exact - low[:, None]) / steps[:, None], 128)
    codes = np.clip(np.rint(places), 0, 255) - 128
    return codes.astype(np.int8), scales.astype(np.float32), low.astype(np.float32)


def dequantize_int8_reference(
    codes: np.ndarray, scales: np.ndarray, offsets: np.ndarray
) -> np.ndarray:
    """As `dequantize_int8`, in float64."""
    steps = codes.astype(np.float64) + 128
    return np.asarray(steps * scales[:, None].astype(np.float64) + offsets[:, None])
