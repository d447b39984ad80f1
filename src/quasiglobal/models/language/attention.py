"""Attention masks of many models at once.

transformers' own mask function branches on tensor values, which vmap does not support. So this file registers a mask
function with transformers that does not; the attention is transformers' own, and the modules stay unmodified.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

NAME = "quasiglobal"


@cache
def registered() -> str:
    """Register the functions and return their `attn_implementation`; needs the extra `nlp`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(NAME, sdpa_attention_forward)
    AttentionMaskInterface.register(NAME, mask)
    return NAME


def mask(**how: Any) -> Tensor:
    """Full attention mask, bool [batch, 1, length, length]; never skipped as trivial."""
    from transformers.masking_utils import sdpa_mask

    found: Tensor = sdpa_mask(**how | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    return found
