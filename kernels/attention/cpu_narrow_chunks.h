// Products for the kinds of numbers that a vector instruction multiplies and adds up in twos or fours: scores of rows of
// whole cache lines, and sums of values. A Kind says how rows are read, multiplied and made floats.
#pragma once

#include "../native/simd.h"
#include "cpu_narrow.h"

#if defined(__AVX512F__)
namespace batchgen {
namespace {

constexpr int LINE = 64, QUADS = 4;  // bytes of a cache line, and vectors that hold it for four rows
constexpr int STEP = 2 * WIDTH;      // numbers of two values that are multiplied at once

// Four rows, as they are multiplied with a query: vector i holds of every 16 bytes the i-th 4 bytes of all four.
// Nothing crosses a lane of 16 bytes: what does takes the units that multiply.
inline void turn_quads(__m512i* rows) {
    const __m512i a = _mm512_unpacklo_epi32(rows[0], rows[1]), b = _mm512_unpackhi_epi32(rows[0], rows[1]);
    const __m512i c = _mm512_unpacklo_epi32(rows[2], rows[3]), d = _mm512_unpackhi_epi32(rows[2], rows[3]);
    rows[0] = _mm512_unpacklo_epi64(a, c), rows[1] = _mm512_unpackhi_epi64(a, c);
    rows[2] = _mm512_unpacklo_epi64(b, d), rows[3] = _mm512_unpackhi_epi64(b, d);
}

// A line of a query to match: the i-th 4 bytes of every 16, four times.
inline void put_quads(char* to, __m512i line) {
    _mm512_store_si512(to, _mm512_shuffle_epi32(line, _MM_PERM_AAAA));
    _mm512_store_si512(to + LINE, _mm512_shuffle_epi32(line, _MM_PERM_BBBB));
    _mm512_store_si512(to + 2 * LINE, _mm512_shuffle_epi32(line, _MM_PERM_CCCC));
    _mm512_store_si512(to + 3 * LINE, _mm512_shuffle_epi32(line, _MM_PERM_DDDD));
}

// Lane i of 16 bytes of the result is the sum of those of fours[i].
template <class Total>
inline Total add_lanes(const Total* fours) {
    const auto add = [](__m512i a, __m512i b) { return (__m512i)((Total)a + (Total)b); };
    const auto halves = [&](Total a, Total b) {
        return add(_mm512_shuffle_i32x4((__m512i)a, (__m512i)b, 0x44), _mm512_shuffle_i32x4((__m512i)a, (__m512i)b, 0xee));
    };
    const __m512i low = halves(fours[0], fours[1]), high = halves(fours[2], fours[3]);
    return (Total)add(_mm512_shuffle_i32x4(low, high, 0x88), _mm512_shuffle_i32x4(low, high, 0xdd));
}

// The products of N lanes with a strip of keys.
template <class Kind, int N, int FIXED>
void score_quads(Scratch& s, int lane, const Rows& keys, int strip, int given) {
    const int bytes = (FIXED ? FIXED : given) * Kind::BYTES;
    typename Kind::Total fours[N][4];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
        for (int four = 0; four < 4; ++four) fours[n][four] = Kind::start(s, lane + n);
#pragma GCC unroll 2
    for (int at = 0; at < bytes; at += LINE) {
        __m512i quads[4][QUADS];
#pragma GCC unroll 4
        for (int four = 0; four < 4; ++four) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                if (at == 0) keys.ahead.fetch(4 * four + i);
                quads[four][i] = Kind::read(keys.row(4 * four + i, bytes) + at);
            }
            turn_quads(quads[four]);
        }
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n)
            Kind::add(fours[n], quads, reinterpret_cast<const char*>(s.query[lane + n]) + at * QUADS * Kind::PARTS);
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
        store(s.scores[lane + n] + strip * STRIP, Kind::score(s, lane + n, add_lanes(fours[n])) * keys.scale(0));
}

// Probabilities times scales of N lanes, as the kind of the values multiplies them; products are multiples of `step`.
template <int N>
struct alignas(64) Chances {
    uint16_t numbers[N][TILE];
    float step;

    __m512i two(int n, int key) const {
        int32_t bits;
        std::memcpy(&bits, numbers[n] + key, sizeof bits);
        return _mm512_set1_epi32(bits);
    }
};

// output = output * correction + chances times values, for SLAB * STEP numbers from `first` on. Sums lie with numbers
// 0-3, 8-11, 16-19, 24-27 of 32 in one vector and the others in the next, as the interleaving of two rows leaves them.
template <class Kind, int N, int SLAB>
BATCHGEN_INLINE void gather_slab(Scratch& s, int lane, const Rows* values, int strips, const Chances<N>& chances,
                                 int first, int width) {
    typename Kind::Total sums[N][2 * SLAB] = {};
    for (int strip = 0; strip < strips; ++strip) {
#pragma GCC unroll 8
        for (int key = 0; key < STRIP; key += 2) {
            const char* rows = values[strip].row(key, width * Kind::BYTES) + first * Kind::BYTES;
            if (first == 0)
                for (int i : {key, key + 1}) values[strip].ahead.fetch(i);
#pragma GCC unroll 2
            for (int v = 0; v < SLAB; ++v) {
                const int left = width - first - v * STEP;
                const __m512i one = Kind::widen(rows + v * STEP * Kind::BYTES, left);
                const __m512i two = Kind::widen(rows + (width + v * STEP) * Kind::BYTES, left);
                const __m512i low = _mm512_unpacklo_epi16(one, two), high = _mm512_unpackhi_epi16(one, two);
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) {
                    const __m512i chance = chances.two(n, strip * STRIP + key);
                    sums[n][2 * v] = Kind::dot(sums[n][2 * v], low, chance);
                    sums[n][2 * v + 1] = Kind::dot(sums[n][2 * v + 1], high, chance);
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * SLAB; ++v) {
            float* out = s.output[lane + n] + first + v * WIDTH;
            const Vec before = load(out) * splat(s.correction[lane + n]);
            store(out, fma(Kind::floats(sums[n][v]), splat(chances.step), before));
        }
}

template <class Kind, int N, int FIXED>
void gather_pairs(Scratch& s, int lane, const Rows* values, int strips, int given) {
    const int width = FIXED ? FIXED : given;
    Chances<N> chances;
    Kind::put_chances(s, lane, values, strips, chances);
    int at = 0;
    for (; at + 2 * STEP <= width; at += 2 * STEP) gather_slab<Kind, N, 2>(s, lane, values, strips, chances, at, width);
    for (; at < width; at += STEP) gather_slab<Kind, N, 1>(s, lane, values, strips, chances, at, width);
}

// Puts the sums of `gather_slab` in the order of the numbers.
inline void arrange_pairs(float* sums, int width) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int at = 0; at < width; at += STEP) {
        const Vec one = load(sums + at), two = load(sums + at + WIDTH);
        store(sums + at, _mm512_permutex2var_ps(one, low, two));
        store(sums + at + WIDTH, _mm512_permutex2var_ps(one, high, two));
    }
}

}  // namespace
}  // namespace batchgen
#endif
