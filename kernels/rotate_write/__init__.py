"""Rotary position encoding, and keys and values of the fed tokens put into the pages: the contract.

The first d dimensions of a head turn as d/2 pairs (i, i + d/2); the other D - d pass through.

    out[i]       = x[i] * cos[i] - x[i + d/2] * sin[i]
    out[i + d/2] = x[i + d/2] * cos[i] + x[i] * sin[i]

cos and sin are cast to the dtype of the tensor they turn, and products and sums are rounded to it, as `transformers`
does. Queries are returned turned. Keys, once turned and rounded so, go to the pages, values as they are:

    pages.keys   at [k, slots[t] // B, slots[t] % B]  hold  turned key[t, k]     pages.values likewise  value[t, k]

made into codes and scales as kernels/kv_format says.

query       [T, Q, D]   float32 or bfloat16, any strides
key, value  [T, K, D]   dtype of query, any strides
cos, sin    [T, d/2]    float32, 0 < d <= D; any scaling of the attention is already in them
slots       [T]         int64, block * B + offset, distinct
pages       LayerPages  written in place; slots not named keep their codes and scales
out         [T, Q, D]   dtype of query, contiguous, new
"""
