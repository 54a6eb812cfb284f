"""Whole KV blocks copied: the contract.

    for source, destination in pairs: stored[:, :, :, destination] = stored[:, :, :, source]

stored  [L, S, K, N, B, W]  any dtype of whole bytes, written in place: L layers, S sides (keys and values), K heads,
                            N blocks of B vectors of W elements; on a device contiguous
pairs   [P, 2]              int64, 0 <= pair < N; no destination is a source or another's destination
"""
