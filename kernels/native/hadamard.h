// Vectors times orthonormal Hadamard matrices: sums and differences of neighbours, then of pairs, and so on, in float32.
// Knows numbers side by side, not what they are.
#pragma once

#include "simd.h"

namespace batchgen {

template <int H, size_t... LANE>
inline Vec exchange(Vec v, std::index_sequence<LANE...>) {
    return __builtin_shufflevector(v, v, (LANE ^ H)...);
}

// 1, and -1 for the upper ones of lanes H apart.
template <int H, size_t... LANE>
inline Vec signs(std::index_sequence<LANE...>) {
    return Vec{(LANE & H ? -1.0f : 1.0f)...};
}

// Sums and differences of lanes H apart, for every H below WIDTH.
template <int H = 1>
inline Vec turn_lanes(Vec v) {
    if constexpr (H < WIDTH) {
        constexpr auto lanes = std::make_index_sequence<WIDTH>();
        return turn_lanes<2 * H>(fma(v, signs<H>(lanes), exchange<H>(v, lanes)));
    } else {
        return v;
    }
}

// Each block of the largest power of two that divides `width`, times its orthonormal Hadamard matrix, in place.
inline void turn(float* x, int width) {
    const int block = width & -width;
    int reach = 1;
    if (block >= WIDTH) {
        for (int at = 0; at < width; at += WIDTH) store(x + at, turn_lanes(load(x + at)));
        reach = WIDTH;
    }
    const float norm = 1.0f / std::sqrt(float(block));
    for (; reach < block; reach *= 2)
        for (int first = 0; first < width; first += 2 * reach)
            for (int i = first; i < first + reach; ++i) {
                const float left = x[i], right = x[i + reach];
                x[i] = left + right, x[i + reach] = left - right;
            }
    for (int i = 0; i < width; ++i) x[i] *= norm;
}

// One block of a size that is known, times its Hadamard matrix without the norm: sqrt(BLOCK) times as large. `factors`
// multiply its numbers before, or are null.
template <int BLOCK, class T>
BATCHGEN_INLINE void turn_block(const T* x, const float* factors, Vec (&rows)[BLOCK / WIDTH]) {
    constexpr int VECTORS = BLOCK / WIDTH;
#pragma GCC unroll 16
    for (int i = 0; i < VECTORS; ++i) rows[i] = load(x + i * WIDTH);
    if (factors)
#pragma GCC unroll 16
        for (int i = 0; i < VECTORS; ++i) rows[i] *= load(factors + i * WIDTH);
#pragma GCC unroll 16
    for (int i = 0; i < VECTORS; ++i) rows[i] = turn_lanes(rows[i]);
#pragma GCC unroll 4
    for (int reach = 1; reach < VECTORS; reach *= 2)
#pragma GCC unroll 16
        for (int i = 0; i < VECTORS; ++i) {
            if (i & reach) continue;
            const Vec left = rows[i], right = rows[i + reach];
            rows[i] = left + right, rows[i + reach] = left - right;
        }
}

}  // namespace batchgen
