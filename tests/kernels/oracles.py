"""The recurrences and the convolution as their equations have them: token by token, in float64 unless told otherwise.

Nothing here is shared with the code under test. The same functions in float32 are the eager path whose rounding error
the references are measured against.
"""

from __future__ import annotations

import math

import torch


def mamba2(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor | None,
    state: torch.Tensor,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``S_t = exp(A dt_t) S_{t-1} + dt_t x_t (x) B_t`` and ``y_t = S_t C_t + D x_t``.

    Args:
        x: ``[rows, T, H, P]``; dt: ``[rows, T, H]``; B, C: ``[rows, T, G, N]``; A, D: ``[H]``.
        state: ``[rows, H, P, N]``, before the first token.

    Returns:
        ``[rows, T, H, P]`` and ``[rows, H, P, N]``.
    """
    x, dt, B, C, A, state = (tensor.to(dtype) for tensor in (x, dt, B, C, A, state))
    heads = x.shape[2]
    group = [head * B.shape[2] // heads for head in range(heads)]
    outputs = torch.zeros_like(x)
    for t in range(x.shape[1]):
        decay = (A * dt[:, t]).exp()[..., None, None]
        update = dt[:, t, :, None, None] * x[:, t, :, :, None] * B[:, t, group, None, :]
        state = decay * state + update
        outputs[:, t] = (state * C[:, t, group, None, :]).sum(-1)
        if D is not None:
            outputs[:, t] += D.to(dtype)[:, None] * x[:, t]
    return outputs, state


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``d_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)``, ``S_t = exp(g_t) S_{t-1} + k_t (x) d_t``, ``y_t = S_t^T q_t``.

    ``k`` and ``q`` are divided by ``sqrt(sum of squares + 1e-6)``, and ``q`` by ``sqrt(K)`` as well.

    Args:
        q, k: ``[rows, T, Hk, K]``; v: ``[rows, T, Hv, V]``; g, beta: ``[rows, T, Hv]``; state: ``[rows, Hv, K, V]``.

    Returns:
        ``[rows, T, Hv, V]`` and ``[rows, Hv, K, V]``.
    """
    q, k, v, g, beta, state = (tensor.to(dtype) for tensor in (q, k, v, g, beta, state))
    heads = v.shape[2]
    key_head = [head * k.shape[2] // heads for head in range(heads)]
    outputs = torch.zeros_like(v)
    for t in range(v.shape[1]):
        key = k[:, t] / (k[:, t].square().sum(-1, keepdim=True) + 1e-6).sqrt()
        query = q[:, t] / (q[:, t].square().sum(-1, keepdim=True) + 1e-6).sqrt() / math.sqrt(q.shape[-1])
        key, query = key[:, key_head, :, None], query[:, key_head, :, None]
        decayed = g[:, t].exp()[..., None, None] * state
        delta = beta[:, t, :, None] * (v[:, t] - (decayed * key).sum(-2))
        state = decayed + key * delta[..., None, :]
        outputs[:, t] = (state * query).sum(-2)
    return outputs, state


def convolution(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """Causal depthwise convolution of a sequence ``[T, D]``; the last tap of ``[D, W]`` is the current token's."""
    inputs, weight = inputs.double(), weight.double()
    taps = weight.shape[1]
    outputs = torch.zeros_like(inputs)
    for t in range(inputs.shape[0]):
        for age in range(min(taps, t + 1)):
            outputs[t] += weight[:, taps - 1 - age] * inputs[t - age]
        if bias is not None:
            outputs[t] += bias.double()
    return outputs / (1 + (-outputs).exp()) if activation == "silu" else outputs
