"""Rotary position encoding of queries and keys: the contract.

The first d dimensions of a head turn as d/2 pairs (i, i + d/2); the other D - d pass through.

    out[i]       = x[i] * cos[i] - x[i + d/2] * sin[i]
    out[i + d/2] = x[i + d/2] * cos[i] + x[i] * sin[i]

cos and sin are cast to the dtype of the tensor they turn, and products and sums are rounded to it, as `transformers`
does.

query     [T, Q, D]  float32 or bfloat16, any strides
key       [T, K, D]  dtype of query
cos, sin  [T, d/2]   float32, d <= D; any scaling of the attention is already in them
out       query [T, Q, D], key [T, K, D]: dtype of query, contiguous, new
"""
