// Products of bfloat16 activations with bfloat16 weights in panels: two inputs of sixteen outputs at a time, products
// exact, sums floats. Knows how pairs lie in a panel, not where their numbers come from.
#pragma once

#include "frame.h"

namespace batchgen {
namespace {

constexpr int PAIR = 2 * OUTPUTS;      // numbers of a panel for two inputs
constexpr int64_t STRETCH = 16;        // pairs between two requests for the next panels
constexpr int64_t BLOCK_TOKENS = 192;  // whose activations stay in the cache while the panels pass

// --- two inputs of sixteen outputs -----------------------------------------------------------------------------------

#if defined(__AVX512BF16__)

struct Pair {
    __m512i numbers;
};
using Two = __m512i;

BATCHGEN_INLINE Pair load_pair(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
BATCHGEN_INLINE void store_pair(uint16_t* p, const Pair& pair) { _mm512_storeu_si512(p, pair.numbers); }

BATCHGEN_INLINE Two load_two(const uint16_t* x) {
    int32_t bits;
    std::memcpy(&bits, x, 4);
    return _mm512_set1_epi32(bits);
}

BATCHGEN_INLINE void dot(Values& sums, const Pair& pair, Two two) {
    sums.part[0] = (Vec)_mm512_dpbf16_ps((__m512)sums.part[0], (__m512bh)pair.numbers, (__m512bh)two);
}

#else

struct Pair {
    Words part[PARTS];  // the first number of an output in the low half
};
struct Two {
    Vec first, second;
};

BATCHGEN_INLINE Pair load_pair(const uint16_t* p) {
    Pair pair;
    std::memcpy(&pair, p, sizeof pair);
    return pair;
}

BATCHGEN_INLINE void store_pair(uint16_t* p, const Pair& pair) { std::memcpy(p, &pair, sizeof pair); }

BATCHGEN_INLINE Two load_two(const uint16_t* x) {
    return {splat(to_float(bfloat16{x[0]})), splat(to_float(bfloat16{x[1]}))};
}

BATCHGEN_INLINE void dot(Values& sums, const Pair& pair, const Two& two) {
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; ++part) {
        sums.part[part] = fma((Vec)(pair.part[part] << 16), two.first, sums.part[part]);
        sums.part[part] = fma((Vec)(pair.part[part] & 0xffff0000), two.second, sums.part[part]);
    }
}

#endif

template <int T, int P, class Number>
BATCHGEN_INLINE void add_pairs(Values (&sums)[T][P], const uint16_t* x, int64_t x_stride, const Number* panel,
                               int64_t stride, int64_t pairs) {
    for (int64_t pair = 0; pair < pairs; ++pair) {
        Pair numbers[P];
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) numbers[p] = load_pair(panel + p * stride + pair * PAIR);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
            const Two two = load_two(x + t * x_stride + pair * 2);
#pragma GCC unroll 8
            for (int p = 0; p < P; ++p) dot(sums[t][p], numbers[p], two);
        }
    }
}

// Activations as bfloat16, an even number of inputs, what is missing zero.
template <class In>
void round_rows(int64_t inputs, const Call& call, bfloat16* to, int64_t token, int64_t end) {
    const int64_t stride = (inputs + 1) / 2 * 2;
    for (; token < end; ++token) {
        const In* x = static_cast<const In*>(call.x) + token * call.x_stride;
        bfloat16* row = to + token * stride;
        row[stride - 1] = {0};
        int64_t i = 0;
        for (; i + WIDTH <= inputs; i += WIDTH) store(row + i, load(x + i));
        if (i < inputs) store_part(row + i, load_part(x + i, int(inputs - i)), int(inputs - i));
    }
}

}  // namespace
}  // namespace batchgen
