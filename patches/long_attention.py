"""Attention of few queries over many keys: the keys are divided into pieces, which a GPU attends to side by side.

PyTorch's masked attention has one program per row and key head, which goes through all the keys. With a small batch
most of a GPU then waits for a few programs.
"""

import torch
from torch.nn.functional import pad

__all__ = ["attend_in_pieces", "pieces_for"]

GPU = "cuda"
PROGRAMS = 256  # about two for each multiprocessor of a large GPU; a smaller one takes more turns
LEAST_KEYS, LEAST_PIECE = 2048, 256  # for fewer the additional launches cost more than is gained
ALIGNMENT = 16  # elements between the rows of a bias, for the kernel's vector loads
HEAD_MULTIPLE = 8  # of the head dimensions, for the same
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FIRST_GPU, BEHIND_LAST_GPU = (8, 0), (10, 0)  # compute capabilities on which every build of torch has the kernel
# Added to the scores of keys that are hidden. Finite, since a piece may have no others; beside real scores its
# exponential is 0. float16 holds no more.
HIDDEN, HIDDEN_FLOAT16 = -1e30, -65504.0


def pieces_for(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> int:
    """Into how many pieces the keys are best divided; 1 where that gains nothing or is not possible.

    `scaled_dot_product_attention` casts under autocast, and takes another kernel where one cannot run. Where it may
    have to do either, it is left to it.

    Args:
        query: ``[B, H, M, D]``. key, value: ``[B, H, S, D]`` and ``[B, H, S, Dv]``.
        mask: as `attend_in_pieces` takes it, or None.
    """
    operands, length = (query, key, value), key.shape[2]
    if mask is None or length < LEAST_KEYS or query.device.type != GPU or not _has_kernel(query.device.index):
        return 1
    if query.dtype not in DTYPES or torch.is_autocast_enabled(GPU) or mask.dtype not in (torch.bool, query.dtype):
        return 1
    if key.dtype != query.dtype or value.dtype != query.dtype:
        return 1
    if any(tensor.requires_grad or tensor.shape[3] % HEAD_MULTIPLE for tensor in operands):
        return 1
    return max(1, min(PROGRAMS // (key.shape[0] * key.shape[1]), length // LEAST_PIECE))


@torch.compiler.assume_constant_result
def _has_kernel(index: int) -> bool:
    """Whether PyTorch's memory-efficient attention surely runs on a GPU."""
    return torch.version.hip is None and FIRST_GPU <= torch.cuda.get_device_capability(index) < BEHIND_LAST_GPU


def attend_in_pieces(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float | None, pieces: int
) -> torch.Tensor:
    """`scaled_dot_product_attention`, without gradients, in so many pieces.

    Each piece gives its output and the logarithm of its sum of exponentials, by which the outputs are weighted: the
    softmax over all keys. Of a query from which all keys are hidden the output is finite and means nothing.

    Args:
        query: ``[B, H, M, D]``. key, value: ``[B, H, S, D]`` and ``[B, H, S, Dv]``, all of one dtype.
        mask: bool or of that dtype, ``[B or 1, 1, M or 1, S]``.
        scale: of the scores, by default ``D^-0.5``.
        pieces: at most ``S``.

    Returns:
        ``[B, H, M, Dv]`` in the query's dtype.
    """
    rows, heads, queries, _ = query.shape
    length = key.shape[2]
    apart = length // pieces
    each = length - apart * (pieces - 1)  # all are equally long, and so overlap by what does not divide
    places = torch.arange(each, device=key.device)
    is_last = torch.arange(pieces, device=key.device) == pieces - 1
    counts = (places < apart) | is_last[:, None]  # [pieces, each]

    lowest = HIDDEN_FLOAT16 if query.dtype == torch.float16 else HIDDEN
    hidden = torch.full((), lowest, dtype=query.dtype, device=query.device)
    parts = mask.unfold(3, each, apart).movedim(3, 2)  # [B or 1, 1, pieces, M or 1, each]
    shown = torch.where(parts, hidden.new_zeros(()), hidden) if mask.dtype == torch.bool else parts.clamp(min=lowest)
    bias = pad(torch.where(counts[:, None], shown, hidden), (0, -each % ALIGNMENT))
    bias = bias.expand(rows, heads, -1, -1, -1).flatten(0, 1)[..., :each].expand(-1, -1, queries, -1)

    keys, values = (x.flatten(0, 1).unfold(1, each, apart).transpose(2, 3) for x in (key, value))
    outputs, logs = _attend(query.flatten(0, 1)[:, None].expand(-1, pieces, -1, -1), keys, values, bias, scale)
    wide = torch.promote_types(query.dtype, torch.float32)
    weights = logs[:, :, :queries, None].to(wide).softmax(1)
    return (outputs.to(wide) * weights).sum(1).to(query.dtype).unflatten(0, (rows, heads))


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs ``[B, H, M, Dv]`` and the logarithms of the sums of exponentials ``[B, H, M or more]``."""
    if query.is_cuda:
        outputs, logs, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, 0.0, False, scale=scale
        )
    else:
        outputs, logs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=bias, scale=scale
        )
    return outputs, logs
