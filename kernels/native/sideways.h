// Across the lanes of vectors: sums, largest ones, and a block of vectors turned.
#pragma once

#include <utility>

#include "simd.h"

namespace batchgen {

template <int H, size_t... LANE>
inline Vec shuffle_low(Vec a, Vec b, std::index_sequence<LANE...>) {
    return __builtin_shufflevector(a, b, (LANE & H ? WIDTH + LANE - H : LANE)...);
}

template <int H, size_t... LANE>
inline Vec shuffle_high(Vec a, Vec b, std::index_sequence<LANE...>) {
    return __builtin_shufflevector(a, b, (LANE & H ? WIDTH + LANE : LANE + H)...);
}

// Blocks of H lanes: the lower ones of a and b side by side, and the upper ones.
template <int H>
inline Vec shuffle_low(Vec a, Vec b) {
    return shuffle_low<H>(a, b, std::make_index_sequence<WIDTH>());
}

template <int H>
inline Vec shuffle_high(Vec a, Vec b) {
    return shuffle_high<H>(a, b, std::make_index_sequence<WIDTH>());
}

template <int H = WIDTH / 2>
inline float sum(Vec v) {
    if constexpr (H > 0) return sum<H / 2>(v + shuffle_high<H>(v, v));
    return v[0];
}

template <int H = WIDTH / 2>
inline float largest(Vec v) {
    if constexpr (H > 0) return largest<H / 2>(larger(v, shuffle_high<H>(v, v)));
    return v[0];
}

template <int H = WIDTH / 2>
inline int32_t largest(Ints v) {
    if constexpr (H > 0) {
        const Ints other = (Ints)shuffle_high<H>((Vec)v, (Vec)v);
        return largest<H / 2>(other > v ? other : v);
    }
    return v[0];
}

// rows[i][j] becomes rows[j][i].
template <int H = WIDTH / 2>
inline void transpose(Vec* rows) {
    if constexpr (H > 0) {
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; ++i) {
            if (i & H) continue;
            const Vec a = rows[i], b = rows[i + H];
            rows[i] = shuffle_low<H>(a, b);
            rows[i + H] = shuffle_high<H>(a, b);
        }
        transpose<H / 2>(rows);
    }
}

// Lane i of the result is what `join` makes of the lanes of rows[i].
template <int H = WIDTH / 2, class Rows, class Join>
inline Rows reduce_each(Rows* rows, const Join& join) {
    if constexpr (H > 0) {
#pragma GCC unroll 8
        for (int i = 0; i < H; ++i) {
            const Vec a = (Vec)rows[i], b = (Vec)rows[i + H];
            rows[i] = join((Rows)shuffle_low<H>(a, b), (Rows)shuffle_high<H>(a, b));
        }
        return reduce_each<H / 2>(rows, join);
    } else {
        return rows[0];
    }
}

inline Vec sum_each(Vec* rows) {
    return reduce_each(rows, [](Vec a, Vec b) { return a + b; });
}

inline Vec largest_each(Vec* rows) {
    return reduce_each(rows, [](Vec a, Vec b) { return larger(a, b); });
}

inline Ints total_each(Ints* rows) {
    return reduce_each(rows, [](Ints a, Ints b) { return a + b; });
}

inline Ints largest_each(Ints* rows) {
    return reduce_each(rows, [](Ints a, Ints b) { return a > b ? a : b; });
}

}  // namespace batchgen
