// Softmax of the wide path: probabilities of a tile of keys under the largest scores so far.
#pragma once

#include "cpu_wide.h"

namespace batchgen {
namespace {

// The powers of two in one of a score as it lies in the tile.
inline Vec exponents(const Scratch& s, int lane, const Scoring& scoring) {
    return scoring.cap ? splat(scoring.exponent) : load(s.unit + lane) * splat(scoring.exponent);
}

inline Vec visible_only(Vec score, Ints key, Ints low, Ints high) {
    return (key >= low) & (key < high) ? score : splat(-INFINITY);
}

// Scores become what softmax exponentiates, in place, where that is more than a factor; then the largest is found.
template <int R>
void cap_mask_and_rank(Scratch& s, int v, int lane0, const Tile& tile, const Scoring& scoring, Vec* top) {
    for (int key = 0; key < tile.count; ++key) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            float* place = &s.scores[key][(v + r) * WIDTH];
            Vec score = load(place);
            if (scoring.cap) {
                const Vec unit = load(s.unit + lane0 + (v + r) * WIDTH);
                score = splat(scoring.cap) * tanh(score * unit * splat(scoring.before_cap));
            }
            if (tile.masked) {
                Ints low, high;
                std::memcpy(&low, s.low + lane0 + (v + r) * WIDTH, sizeof low);
                std::memcpy(&high, s.high + lane0 + (v + r) * WIDTH, sizeof high);
                score = visible_only(score, Ints{} + (tile.first + key), low, high);
            }
            store(place, score);
            top[r] = larger(score, top[r]);
        }
    }
}

// Probabilities of R vectors of lanes from their scores.
template <class Values, int R>
struct Softening {
    Scratch& s;
    int v;
    Vec exponent[R], shift[R], total[R];

    Vec chance(int key, int r) const {
        return Values::power(fma(load(&s.scores[key][(v + r) * WIDTH]), exponent[r], shift[r]));
    }

    // Of one key.
    void single(int key) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const Vec p = chance(key, r);
            total[r] += p;
            store(&s.chances[key][(v + r) * WIDTH], p);
        }
    }

    // Of two keys side by side, or of the last one and nothing.
    template <bool BOTH>
    void pair(int key) {
#if defined(__AVX512BF16__)
        const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                               6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const Vec first = chance(key, r), second = BOTH ? chance(key + 1, r) : Vec{};
            total[r] += BOTH ? first + second : first;
            const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
            store(&s.chances[key / 2][(v + r) * WIDTH], (Vec)_mm512_permutexvar_epi16(order, both));
        }
#endif
    }

    void all(int count) {
        int key = 0;
        if constexpr (Values::PACK == 1)
            for (; key < count; ++key) single(key);
        for (; key + 2 <= count; key += 2) pair<true>(key);
        if (key < count) pair<false>(key);
    }
};

template <class Values, int R>
void soften_vectors(Scratch& s, int v, int lane0, const Tile& tile, const Scoring& scoring) {
    Softening<Values, R> soft{s, v};
    Vec top[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) top[r] = load(s.top + (v + r) * WIDTH);
    if (!scoring.ranks(tile.masked)) cap_mask_and_rank<R>(s, v, lane0, tile, scoring, top);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        const int lane = (v + r) * WIDTH;
        soft.exponent[r] = exponents(s, lane0 + lane, scoring);
        const Vec correction = exp2<6>((load(s.largest + lane0 + lane) - top[r]) * soft.exponent[r]);
        store(s.largest + lane0 + lane, top[r]);
        store(s.correction + lane, correction);
        soft.shift[r] = -top[r] * soft.exponent[r];
        soft.total[r] = load(s.total + lane0 + lane) * correction;
    }
    soft.all(tile.count);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) store(s.total + lane0 + (v + r) * WIDTH, soft.total[r]);
}

// Softmax of a tile's scores under the largest so far: fills chances, correction, and brings largest and total up.
template <class Values>
void soften(Scratch& s, int vectors, int lane0, const Tile& tile, const Scoring& scoring) {
    int v = 0;
    for (; v + 4 <= vectors; v += 4) soften_vectors<Values, 4>(s, v, lane0, tile, scoring);
    for (; v < vectors; ++v) soften_vectors<Values, 1>(s, v, lane0, tile, scoring);
}

}  // namespace
}  // namespace batchgen
