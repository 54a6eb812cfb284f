"""Rows of a table: the contract.

    out[t] = table[index[t]]

table  [N, W]  any dtype of whole bytes, contiguous
index  [T]     int64, 0 <= index < N
out    [T, W]  new
"""
