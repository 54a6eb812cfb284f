// Attention of one or a few (query, head) lanes over a run of keys: every key is read once, in place, for all lanes.
// A vector holds neighbouring numbers of one key. What comes next, at last the first keys of the next task, is fetched
// row by row meanwhile, so that memory seldom rests.
#include <algorithm>
#include <memory>

#include "cpu.h"

namespace batchgen {
namespace {

constexpr int PADDED = MAX_HEAD_DIM + 2 * WIDTH;

struct alignas(64) Scratch {
    float query[NARROW_LANES][PADDED];
    float output[NARROW_LANES][PADDED];
    float scores[NARROW_LANES][NARROW_KEYS];
    float chances[NARROW_LANES][NARROW_KEYS];
    float largest[NARROW_LANES], total[NARROW_LANES], correction[NARROW_LANES];
    int32_t low[NARROW_LANES], high[NARROW_LANES];
};

// Numbers multiplied one by one in float32.
struct Single {
    using Operand = float;
    static constexpr int DEGREE = 6;

    template <class Q>
    static void keep_query(const Q* row, int width, float* out) {
        int at = 0;
        for (; at + WIDTH <= width; at += WIDTH) store(out + at, load(row + at));
        if (at < width) store(out + at, load_part(row + at, width - at));
    }

    // Sums of N lanes' products with WIDTH keys; lane i of a vector is key i.
    template <int N, class T>
    static BATCHGEN_INLINE void score(const Scratch& s, const T* const* rows, const T* const* ahead, int width, Vec* out) {
        Vec sums[N][WIDTH];
        for (int key = 0; key < WIDTH; ++key) {
            prefetch(ahead[key], width * sizeof(T));
            Vec sum[N] = {};
            int at = 0;
            for (; at + WIDTH <= width; at += WIDTH) {
                const Vec k = load(rows[key] + at);
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) sum[n] = fma(load(s.query[n] + at), k, sum[n]);
            }
            if (at < width) {
                const Vec k = load_part(rows[key] + at, width - at);
                for (int n = 0; n < N; ++n) sum[n] = fma(load(s.query[n] + at), k, sum[n]);
            }
            for (int n = 0; n < N; ++n) sums[n][key] = sum[n];
        }
        for (int n = 0; n < N; ++n) out[n] = sum_each(sums[n]);
    }

    static void keep_chances(Scratch& s, int n, int at, Vec p) { store(&s.chances[n][at], p); }

    template <int N, int SLAB, class T>
    static BATCHGEN_INLINE void gather_slab(Scratch& s, const T* const* rows, const T* const* ahead, int keys, int first) {
        Vec sums[N][SLAB];
        for (int n = 0; n < N; ++n)
            for (int v = 0; v < SLAB; ++v)
                sums[n][v] = load(s.output[n] + first + v * WIDTH) * splat(s.correction[n]);
        for (int key = 0; key < keys; ++key) {
            prefetch(ahead[key] + first, SLAB * WIDTH * sizeof(T));
#pragma GCC unroll 4
            for (int v = 0; v < SLAB; ++v) {
                const Vec value = load(rows[key] + first + v * WIDTH);
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) sums[n][v] = fma(splat(s.chances[n][key]), value, sums[n][v]);
            }
        }
        for (int n = 0; n < N; ++n)
            for (int v = 0; v < SLAB; ++v) store(s.output[n] + first + v * WIDTH, sums[n][v]);
    }

    // output = output * correction + chances times values.
    template <int N, class T>
    static BATCHGEN_INLINE void gather(Scratch& s, const T* const* rows, const T* const* ahead, int keys, int width) {
        constexpr int SLAB = WIDTH == 16 ? 4 : 2;
        int at = 0;
        for (; at + SLAB * WIDTH <= width; at += SLAB * WIDTH) gather_slab<N, SLAB>(s, rows, ahead, keys, at);
        for (; at + WIDTH <= width; at += WIDTH) gather_slab<N, 1>(s, rows, ahead, keys, at);
        if (at == width) return;
        for (int n = 0; n < N; ++n) {
            Vec sum = load(s.output[n] + at) * splat(s.correction[n]);
            for (int key = 0; key < keys; ++key)
                sum = fma(splat(s.chances[n][key]), load_part(rows[key] + at, width - at), sum);
            store(s.output[n] + at, sum);
        }
    }

    static Vec result(const Scratch& s, int n, int at) { return load(s.output[n] + at); }
};

#if defined(__AVX512BF16__)
// Neighbouring bfloat16 multiplied in pairs. Sums of values are kept with numbers 0-3, 8-11, 16-19, 24-27 of 32 in the
// first vector and the others in the second, as the interleaving of two rows leaves them.
struct Pairs {
    using Operand = bfloat16;
    static constexpr int STEP = 2 * WIDTH, DEGREE = 4;

    static __m512i read(const bfloat16* p, int count) {
        if (count >= STEP) return _mm512_loadu_si512(p);
        return _mm512_maskz_loadu_epi16((1u << count) - 1, p);
    }

    static void keep_query(const bfloat16* row, int width, float* out) {
        std::memset(out, 0, sizeof(float) * PADDED);
        std::memcpy(out, row, width * sizeof(bfloat16));
    }

    static Vec dot(Vec sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

    template <int N>
    static BATCHGEN_INLINE void score(const Scratch& s, const bfloat16* const* rows, const bfloat16* const* ahead, int width,
                             Vec* out) {
        Vec sums[N][WIDTH];
        for (int key = 0; key < WIDTH; ++key) {
            prefetch(ahead[key], width * sizeof(bfloat16));
            Vec sum[N] = {};
            for (int at = 0; at < width; at += STEP) {
                const __m512i k = read(rows[key] + at, width - at);
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) sum[n] = dot(sum[n], _mm512_loadu_si512(s.query[n] + at / 2), k);
            }
            for (int n = 0; n < N; ++n) sums[n][key] = sum[n];
        }
        for (int n = 0; n < N; ++n) out[n] = sum_each(sums[n]);
    }

    static void keep_chances(Scratch& s, int n, int at, Vec p) {
        store(reinterpret_cast<bfloat16*>(s.chances[n]) + at, p);
    }

    template <int N, int SLAB>
    static BATCHGEN_INLINE void gather_slab(Scratch& s, const bfloat16* const* rows, const bfloat16* const* ahead, int keys,
                                   int first, int width) {
        Vec sums[N][2 * SLAB];
        for (int n = 0; n < N; ++n)
            for (int v = 0; v < 2 * SLAB; ++v)
                sums[n][v] = load(s.output[n] + first + v * WIDTH) * splat(s.correction[n]);
        for (int key = 0; key < keys; key += 2) {
            const bfloat16 *a = rows[key] + first, *b = rows[key + 1] + first;
            prefetch(ahead[key] + first, SLAB * STEP * sizeof(bfloat16));
            prefetch(ahead[key + 1] + first, SLAB * STEP * sizeof(bfloat16));
            Vec chance[N];
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) chance[n] = splat(s.chances[n][key / 2]);
#pragma GCC unroll 2
            for (int v = 0; v < SLAB; ++v) {
                const int left = width - first - v * STEP;
                const __m512i one = read(a + v * STEP, left), two = read(b + v * STEP, left);
                const __m512i low = _mm512_unpacklo_epi16(one, two), high = _mm512_unpackhi_epi16(one, two);
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) {
                    sums[n][2 * v] = dot(sums[n][2 * v], low, (__m512i)chance[n]);
                    sums[n][2 * v + 1] = dot(sums[n][2 * v + 1], high, (__m512i)chance[n]);
                }
            }
        }
        for (int n = 0; n < N; ++n)
            for (int v = 0; v < 2 * SLAB; ++v) store(s.output[n] + first + v * WIDTH, sums[n][v]);
    }

    template <int N>
    static BATCHGEN_INLINE void gather(Scratch& s, const bfloat16* const* rows, const bfloat16* const* ahead, int keys,
                              int width) {
        int at = 0;
        for (; at + 2 * STEP <= width; at += 2 * STEP) gather_slab<N, 2>(s, rows, ahead, keys, at, at + 2 * STEP);
        for (; at < width; at += STEP) gather_slab<N, 1>(s, rows, ahead, keys, at, width);
    }

    static Vec result(const Scratch& s, int n, int at) {
        const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        const int base = at / STEP * STEP;
        const Vec one = load(s.output[n] + base), two = load(s.output[n] + base + WIDTH);
        return _mm512_permutex2var_ps(one, at == base ? low : high, two);
    }
};
#endif

inline Ints from_zero() {
    Ints lanes;
    for (int lane = 0; lane < WIDTH; ++lane) lanes[lane] = lane;
    return lanes;
}

// Softmax of one lane's scores of keys first .. first + keys under the largest so far.
template <class Kind>
void soften(Scratch& s, int n, int first, int keys, const Scoring& scoring) {
    const Ints index = from_zero() + first;
    Vec top = splat(s.largest[n]);
    for (int at = 0; at < keys; at += WIDTH) {
        Vec score = load(s.scores[n] + at);
        if (scoring.cap) score = splat(scoring.cap) * tanh(score * splat(scoring.before_cap));
        const Ints key = index + at;
        score = (key >= s.low[n]) & (key < s.high[n]) ? score : splat(-INFINITY);
        store(s.scores[n] + at, score);
        top = larger(score, top);
    }
    const float highest = largest(top);
    s.correction[n] = exp2<6>(splat((s.largest[n] - highest) * scoring.exponent))[0];
    s.largest[n] = highest;
    Vec total{};
    for (int at = 0; at < keys; at += WIDTH) {
        const Vec p = exp2<Kind::DEGREE>(fma(load(s.scores[n] + at), splat(scoring.exponent), splat(-highest * scoring.exponent)));
        Kind::keep_chances(s, n, at, p);
        total += p;
    }
    s.total[n] = s.total[n] * s.correction[n] + sum(total);
}

// The slots of up to NARROW_KEYS keys; those behind `count` repeat the last.
struct Tile {
    int64_t slots[NARROW_KEYS];
    int count = 0;

    template <class Q>
    void find(const Target<Q>& target, int first, int end) {
        count = std::max(0, std::min(NARROW_KEYS, end - first));
        if (!count) return;
        locate(target.plan, target.call, target.task, target.kv_head, first, count, slots);
        std::fill(slots + count, slots + NARROW_KEYS, slots[count - 1]);
    }
};

// Numbers of a tile's keys and values where the pages hold them in another format.
struct alignas(64) Room {
    float keys[NARROW_KEYS * MAX_HEAD_DIM];
    float values[NARROW_KEYS * MAX_HEAD_DIM];

    static Room& mine() {
        static thread_local std::unique_ptr<Room> room(new Room);
        return *room;
    }
};

// Rows of a tile to work on, and rows to fetch meanwhile; behind the last key it is repeated.
template <class O>
struct Rows {
    const O *now[NARROW_KEYS], *ahead[NARROW_KEYS];

    template <int FIXED>
    void read(const Stored& stored, const Tile& tile, const Tile& next, int width, float* room) {
        read_rows<FIXED>(stored, tile.slots, next.slots, tile.count, width, reinterpret_cast<O*>(room), width, now, ahead);
        for (int key = tile.count; key < NARROW_KEYS; ++key) now[key] = now[key - 1], ahead[key] = ahead[key - 1];
    }
};

// The keys that any lane of a task sees.
struct Extent {
    int32_t begin = INT32_MAX, end = 0;

    template <class Q>
    explicit Extent(const Target<Q>& target) {
        for (int query = 0; query < target.task.num_queries; ++query) {
            int32_t low, high;
            target.visible(query, low, high);
            begin = std::min(begin, low), end = std::max(end, high);
        }
    }
};

// FIXED is the width where it is known when compiling, else 0. Values are fetched while keys are worked on, the next
// keys while values are: so what waits in the first cache is one tile and not two.
template <class Kind, int N, int FIXED>
void attend_tile(Scratch& s, const Call& call, const Tile& tile, const Tile& next, int first, const Scoring& scoring) {
    const int width = FIXED ? FIXED : int(call.head_dim), keys = (tile.count + WIDTH - 1) / WIDTH * WIDTH;
    Rows<typename Kind::Operand> key, value;
    key.template read<FIXED>(call.keys, tile, next, width, Room::mine().keys);
    value.template read<FIXED>(call.values, tile, next, width, Room::mine().values);
    for (int at = 0; at < keys; at += WIDTH) {
        Vec scores[N];
        Kind::template score<N>(s, key.now + at, value.now + at, width, scores);
        for (int n = 0; n < N; ++n) store(s.scores[n] + at, scores[n]);
    }
    for (int n = 0; n < N; ++n) soften<Kind>(s, n, first, keys, scoring);
    Kind::template gather<N>(s, value.now, key.ahead, keys, width);
}

template <class Kind, int N, int FIXED, class Q>
void attend(const Target<Q>& target, const Target<Q>* after) {
    const Scoring scoring(target.call);
    const int width = int(target.call.head_dim);
    Scratch s;
    for (int n = 0; n < N; ++n) {
        target.visible(n / target.group, s.low[n], s.high[n]);
        Kind::keep_query(target.query_row(n / target.group, n % target.group), width, s.query[n]);
        std::memset(s.output[n], 0, (width + 2 * WIDTH) * sizeof(float));  // vectors at the edge reach beyond the width
        s.largest[n] = NO_SCORE, s.total[n] = 0;
    }
    const Extent extent(target);
    Tile tiles[2];
    tiles[0].find(target, extent.begin, extent.end);
    for (int first = extent.begin, turn = 0; first < extent.end; first += NARROW_KEYS, turn ^= 1) {
        Tile& next = tiles[turn ^ 1];
        next.find(target, first + NARROW_KEYS, extent.end);
        if (!next.count && after) {
            const Extent following(*after);
            next.find(*after, following.begin, following.end);
        }
        if (!next.count) std::copy_n(tiles[turn].slots, NARROW_KEYS, next.slots);
        attend_tile<Kind, N, FIXED>(s, target.call, tiles[turn], next, first, scoring);
    }
    for (int n = 0; n < N; ++n) {
        int64_t partial;
        Q* out = target.output_row(n / target.group, n % target.group, partial);
        target.remember(partial, s.largest[n] * scoring.exponent, s.total[n]);
        const Vec inverse = splat(s.total[n] ? 1 / s.total[n] : 0.0f);
        for (int at = 0; at < width; at += WIDTH) {
            const Vec part = Kind::result(s, n, at) * inverse;
            if (at + WIDTH <= width) store(out + at, part);
            else store_part(out + at, part, width - at);
        }
    }
}

template <class Kind, int N, class Q>
void attend_width(const Target<Q>& target, const Target<Q>* after) {
    switch (target.call.head_dim) {
        case 64: return attend<Kind, N, 64>(target, after);
        case 128: return attend<Kind, N, 128>(target, after);
        default: return attend<Kind, N, 0>(target, after);
    }
}

template <class Kind, class Q>
void attend_lanes(const Target<Q>& target, const Target<Q>* after) {
    static_assert(NARROW_LANES == 4);
    switch (target.task.num_queries * target.group) {
        case 1: return attend_width<Kind, 1>(target, after);
        case 2: return attend_width<Kind, 2>(target, after);
        case 3: return attend_width<Kind, 3>(target, after);
        default: return attend_width<Kind, 4>(target, after);
    }
}

}  // namespace

template <class Q>
void attend_narrow(const Target<Q>& target, const Target<Q>* after) {
#if defined(__AVX512BF16__)
    if constexpr (sizeof(Q) == 2) return attend_lanes<Pairs>(target, after);
#endif
    return attend_lanes<Single>(target, after);
}

template void attend_narrow(const Target<float>&, const Target<float>*);
template void attend_narrow(const Target<bfloat16>&, const Target<bfloat16>*);

}  // namespace batchgen
