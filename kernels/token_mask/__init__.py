"""Forbidden tokens: the contract of `mask`.

mask(logits, rows, bits) -> None
    logits [R, V] float32, written to: row rows[i] gets -inf at every token id whose bit is 0 in bits[i]
    rows   [M] int64, distinct
    bits   [M, W] int32: bit v % 32 of word v // 32 stands for token id v; ids at or above 32 * W count as 0
"""
