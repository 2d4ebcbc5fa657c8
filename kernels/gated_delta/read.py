"""How the Gated DeltaNet step reads a block of the state: from memory once, in chunks of its rows."""

import triton
import triton.language as tl

from replay_transformers.kernels.tiles import RECORDS, cut, cut_product, exact_product

__all__ = ["answers_to_many", "answers_to_one", "halves", "product", "read_chunk"]


@triton.jit
def product(a, b, added):
    """``added + a @ b`` in float32, ``a`` and ``b`` of any type.

    Exact where one is bfloat16. Added after the product, since matrix units truncate where they accumulate.
    """
    if a.dtype == b.dtype and a.dtype.primitive_bitwidth == 16:
        return added + exact_product(a, b, tl.zeros([a.shape[0], b.shape[1]], tl.float32))
    elif a.dtype == tl.bfloat16 and b.dtype == tl.float32:
        high, middle, low = cut(b)
        none = tl.zeros([a.shape[0], b.shape[1]], tl.float32)
        return added + exact_product(a, high, exact_product(a, middle, exact_product(a, low, none)))
    elif a.dtype == tl.float32 and b.dtype == tl.bfloat16:
        return added + cut_product(a, b, tl.zeros([a.shape[0], b.shape[1]], tl.float32))
    else:
        return tl.fma(tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="tf32x3"), 1.0, added)


@triton.jit
def read_chunk(
    block, key, query, k_state, q_state, begin, p_ok,
    WIDTH: tl.constexpr, STATES: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some rows of the state ``[ROWS, BLOCK_V]``, and of a key and a query ``[ROWS]``, as stored."""
    i, p = begin + tl.arange(0, ROWS), tl.arange(0, BLOCK_V)
    k_ok = i < STATES
    s = tl.load(block + (i[:, None] * WIDTH + p[None, :]), mask=k_ok[:, None] & p_ok[None, :], other=0.0)
    return s, tl.load(key + i * k_state, mask=k_ok, other=0.0), tl.load(query + i * q_state, mask=k_ok, other=0.0)


@triton.jit
def _answers(chunk):
    s = chunk[0].to(tl.float32)
    return tl.sum(s * chunk[1].to(tl.float32)[:, None], 0), tl.sum(s * chunk[2].to(tl.float32)[:, None], 0)


@triton.jit
def answers_to_one(
    chunk, block, key, query, k_state, q_state, p_ok,
    WIDTH: tl.constexpr, STATES: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``S^T k`` and ``S^T q`` of one token, each ``[BLOCK_V]``, from the first ``chunk`` and the rest of the block."""
    answer_k, answer_q = _answers(chunk)
    for begin in tl.static_range(ROWS, BLOCK_K, ROWS):
        part_k, part_q = _answers(
            read_chunk(block, key, query, k_state, q_state, begin, p_ok, WIDTH, STATES, BLOCK_V, ROWS)
        )
        answer_k, answer_q = answer_k + part_k, answer_q + part_q
    return answer_k, answer_q


@triton.jit
def answers_to_many(
    block, key, query, k_token, k_state, q_token, q_state, p_ok,
    WIDTH: tl.constexpr, STATES: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
    TOKENS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``S^T k`` and ``S^T q`` of up to 8 tokens by the matrix units, each ``[8, BLOCK_V]``."""
    half: tl.constexpr = RECORDS // 2
    m, n, p = tl.arange(0, RECORDS), tl.arange(0, CHUNK), tl.arange(0, BLOCK_V)
    token, is_key = m % half, m < half
    answers = tl.zeros([RECORDS, BLOCK_V], tl.float32)
    for begin in tl.range(0, BLOCK_K, CHUNK, num_stages=STAGES):
        i = begin + n
        k_ok = i < STATES
        ok = (token < TOKENS)[:, None] & k_ok[None, :]
        part_k = tl.load(key + (token[:, None] * k_token + i[None, :] * k_state), mask=ok & is_key[:, None], other=0.0)
        part_q = tl.load(
            query + (token[:, None] * q_token + i[None, :] * q_state), mask=ok & ~is_key[:, None], other=0.0
        )
        s = tl.load(block + (i[:, None] * WIDTH + p[None, :]), mask=k_ok[:, None] & p_ok[None, :], other=0.0)
        answers = product(tl.where(is_key[:, None], part_k, part_q), s, answers)
    return halves(answers, BLOCK_V)


@triton.jit
def halves(answers, BLOCK_V: tl.constexpr):
    """The upper and the lower half of 16 rows."""
    both = tl.reshape(answers, [2, RECORDS // 2, BLOCK_V])
    is_first = (tl.arange(0, 2) == 0)[:, None, None]
    return tl.sum(tl.where(is_first, both, 0.0), 0), tl.sum(tl.where(is_first, 0.0, both), 0)
