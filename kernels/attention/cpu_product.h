// Small matrix products with a vector for one number of each of several lanes, and the kinds of numbers they take.
// Knows registers and strides; knows nothing of keys or softmax.
#pragma once

#include "../native/simd.h"
#include "cpu.h"

namespace batchgen {
namespace {

// How products are formed. An element is 32 bits: one float, two neighbouring bfloat16, or four neighbouring bytes.
struct Single {
    using Operand = float;
    using Sum = Vec;
    static constexpr int PACK = 1;
    static Vec add(Vec sum, Vec lanes, Vec value) { return fma(lanes, value, sum); }
    static Vec power(Vec x) { return exp2<6>(x); }  // probabilities, as near as they are multiplied
};

#if defined(__AVX512BF16__)
struct Pairs {
    using Operand = bfloat16;
    using Sum = Vec;
    static constexpr int PACK = 2;
    static Vec add(Vec sum, Vec lanes, Vec value) { return _mm512_dpbf16_ps(sum, (__m512bh)lanes, (__m512bh)value); }
    static Vec power(Vec x) { return exp2_rough(x); }
};
#endif

#if defined(__AVX512VNNI__)
// Whole numbers, signed in the lanes and unsigned in what all lanes are multiplied with.
struct Fours {
    using Operand = uint8_t;
    using Sum = Ints;
    static constexpr int PACK = 4;
    static Ints add(Ints sum, Vec lanes, Vec value) {
        return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)value, (__m512i)lanes);
    }
};
#endif

// Scores: the largest of each lane are kept in `top`, if any.
struct Ranked {
    float* top;

    bool ranks() const { return top; }
};

// out[row][lanes] = what `ends` makes of the sum over k of a[row * ROW + k * DEPTH] times b[k][lanes], for C rows from
// `row` and R vectors of lanes from `lane` on. `ends` says where sums start, and whether the largest results are kept.
template <class Kind, int C, int R, int ROW, int DEPTH, class Ends>
inline void product_block(const float* a, const float* b, int depth, float* out, const Ends& ends, int row, int lane) {
    typename Kind::Sum sums[C][R];
    a += row * ROW, b += lane, out += row * LANES + lane;
#pragma GCC unroll 24
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[c][r] = ends.start(out + c * LANES + r * WIDTH, lane + r * WIDTH);
    for (int k = 0; k < depth; ++k) {
        Vec lanes[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) lanes[r] = load(b + k * LANES + r * WIDTH);
#pragma GCC unroll 24
        for (int c = 0; c < C; ++c) {
            const Vec value = splat(a[c * ROW + k * DEPTH]);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) sums[c][r] = Kind::add(sums[c][r], lanes[r], value);
        }
    }
    Vec results[C][R];
#pragma GCC unroll 24
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            results[c][r] = ends.result(sums[c][r], row + c);
            store(out + c * LANES + r * WIDTH, results[c][r]);
        }
    if (!ends.ranks()) return;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        Vec top = load(ends.top + lane + r * WIDTH);
#pragma GCC unroll 24
        for (int c = 0; c < C; ++c) top = larger(results[c][r], top);
        store(ends.top + lane + r * WIDTH, top);
    }
}

template <class Kind, int C, int R, int ROW, int DEPTH, class Ends>
void product_rows(const float* a, const float* b, int depth, float* out, const Ends& ends, int rows, int lane) {
    int row = 0;
    for (; row + C <= rows; row += C) product_block<Kind, C, R, ROW, DEPTH>(a, b, depth, out, ends, row, lane);
    for (; row + 4 <= rows; row += 4) product_block<Kind, 4, R, ROW, DEPTH>(a, b, depth, out, ends, row, lane);
    for (; row < rows; ++row) product_block<Kind, 1, R, ROW, DEPTH>(a, b, depth, out, ends, row, lane);
}

// As product_block, for any number of rows and of vectors: as many at once as there are registers.
template <class Kind, int ROW, int DEPTH, class Ends>
void product(const float* a, const float* b, int depth, float* out, const Ends& ends, int rows, int vectors) {
    for (int v = 0; v < vectors;) {
        const int left = vectors - v, lane = v * WIDTH;
#if defined(__AVX512F__)
        if (left >= 4) {
            product_rows<Kind, 6, 4, ROW, DEPTH>(a, b, depth, out, ends, rows, lane), v += 4;
        } else if (left == 3) {
            product_rows<Kind, 8, 3, ROW, DEPTH>(a, b, depth, out, ends, rows, lane), v += 3;
        } else if (left == 2) {
            product_rows<Kind, 12, 2, ROW, DEPTH>(a, b, depth, out, ends, rows, lane), v += 2;
        } else {
            product_rows<Kind, 16, 1, ROW, DEPTH>(a, b, depth, out, ends, rows, lane), v += 1;
        }
#else
        if (left >= 2) {
            product_rows<Kind, 6, 2, ROW, DEPTH>(a, b, depth, out, ends, rows, lane), v += 2;
        } else {
            product_rows<Kind, 12, 1, ROW, DEPTH>(a, b, depth, out, ends, rows, lane), v += 1;
        }
#endif
    }
}

}  // namespace
}  // namespace batchgen
