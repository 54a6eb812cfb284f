// Attention of many (query, head) lanes over a run of keys: a tile of keys and values is packed once and stays in the
// cache while the lanes pass. A vector holds one number of each of several lanes, so softmax needs no sideways sums.
#include <algorithm>
#include <memory>
#include <type_traits>

#include "cpu.h"

namespace batchgen {
namespace {

// How products are formed. An element is 32 bits: one float, or two neighbouring bfloat16.
struct Single {
    using Operand = float;
    static constexpr int PACK = 1;
    static Vec add(Vec sum, Vec a, Vec b) { return fma(a, b, sum); }
};

#if defined(__AVX512BF16__)
struct Pairs {
    using Operand = bfloat16;
    static constexpr int PACK = 2;
    static Vec add(Vec sum, Vec a, Vec b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
};
#endif

constexpr int VALUE_STRIDE = MAX_HEAD_DIM + 16;  // 33 cache lines: rows fall into different sets
template <class Kind>
constexpr int KEY_STRIDE = MAX_HEAD_DIM / Kind::PACK + 16;

struct alignas(64) Scratch {
    float query[MAX_LANES / LANES][MAX_HEAD_DIM][LANES];
    float output[MAX_LANES / LANES][MAX_HEAD_DIM][LANES];
    float rows[WIDTH][MAX_HEAD_DIM];
    float keys[WIDE_KEYS * KEY_STRIDE<Single>];
    float values[WIDE_KEYS * VALUE_STRIDE];
    float room[WIDE_KEYS * MAX_HEAD_DIM];
    float scores[WIDE_KEYS][LANES];
    float chances[WIDE_KEYS][LANES];
    float largest[MAX_LANES], total[MAX_LANES], correction[LANES];
    int32_t low[MAX_LANES], high[MAX_LANES];
};

Scratch& scratch() {
    static thread_local std::unique_ptr<Scratch> mine(new Scratch);
    return *mine;
}

// out[row][lanes] (+)= sum over k of a[row * ROW + k * DEPTH] times b[k][lanes], for C rows and R vectors of lanes.
template <class Kind, int C, int R, int ROW, int DEPTH>
inline void product_block(const float* a, const float* b, int depth, float* out, const float* factor) {
    Vec sums[C][R];
#pragma GCC unroll 24
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
            sums[c][r] = factor ? load(out + c * LANES + r * WIDTH) * load(factor + r * WIDTH) : Vec{};
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
#pragma GCC unroll 24
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) store(out + c * LANES + r * WIDTH, sums[c][r]);
}

template <class Kind, int C, int R, int ROW, int DEPTH>
void product_rows(const float* a, const float* b, int depth, float* out, const float* factor, int rows) {
    int row = 0;
    for (; row + C <= rows; row += C)
        product_block<Kind, C, R, ROW, DEPTH>(a + row * ROW, b, depth, out + row * LANES, factor);
    for (; row + 4 <= rows; row += 4)
        product_block<Kind, 4, R, ROW, DEPTH>(a + row * ROW, b, depth, out + row * LANES, factor);
    for (; row < rows; ++row)
        product_block<Kind, 1, R, ROW, DEPTH>(a + row * ROW, b, depth, out + row * LANES, factor);
}

// As product_block, for any number of rows and of vectors: as many at once as there are registers.
template <class Kind, int ROW, int DEPTH>
void product(const float* a, const float* b, int depth, float* out, const float* factor, int rows, int vectors) {
    for (int v = 0; v < vectors;) {
        const float* part = factor ? factor + v * WIDTH : nullptr;
        const float* lanes = b + v * WIDTH;
        float* sums = out + v * WIDTH;
        const int left = vectors - v;
#if defined(__AVX512F__)
        if (left >= 4) {
            product_rows<Kind, 6, 4, ROW, DEPTH>(a, lanes, depth, sums, part, rows), v += 4;
        } else if (left == 3) {
            product_rows<Kind, 8, 3, ROW, DEPTH>(a, lanes, depth, sums, part, rows), v += 3;
        } else if (left == 2) {
            product_rows<Kind, 12, 2, ROW, DEPTH>(a, lanes, depth, sums, part, rows), v += 2;
        } else {
            product_rows<Kind, 16, 1, ROW, DEPTH>(a, lanes, depth, sums, part, rows), v += 1;
        }
#else
        if (left >= 2) {
            product_rows<Kind, 6, 2, ROW, DEPTH>(a, lanes, depth, sums, part, rows), v += 2;
        } else {
            product_rows<Kind, 12, 1, ROW, DEPTH>(a, lanes, depth, sums, part, rows), v += 1;
        }
#endif
    }
}

// A row of numbers as elements of the kind; an odd last bfloat16 is paired with zero.
template <class Kind, class T>
void pack_row(const T* row, int width, float* out) {
    using Operand = typename Kind::Operand;
    Operand* to = reinterpret_cast<Operand*>(out);
    if constexpr (std::is_same_v<Operand, T>) std::memcpy(to, row, width * sizeof(T));
    else ReadPlain<T>::row(reinterpret_cast<const char*>(row), nullptr, width, to);
    if (Kind::PACK == 2 && width % 2) std::memset(to + width, 0, sizeof(Operand));
}

// Two rows side by side as pairs; the second may be absent.
inline void pack_pair(const bfloat16* first, const bfloat16* second, int width, float* out) {
    const auto pairs = [&](Vec a, Vec b) { return (Vec)((Words)b | ((Words)a >> 16)); };
    int at = 0;
    for (; at + WIDTH <= width; at += WIDTH)
        store(out + at, pairs(load(first + at), second ? load(second + at) : Vec{}));
    const int rest = width - at;
    if (rest) store(out + at, pairs(load_part(first + at, rest), second ? load_part(second + at, rest) : Vec{}));
}

template <class Kind>
void pack_keys(const typename Kind::Operand* const* rows, int count, int width, float* out) {
    for (int key = 0; key < count; ++key) pack_row<Kind>(rows[key], width, out + key * KEY_STRIDE<Kind>);
}

template <class Kind>
void pack_values(const typename Kind::Operand* const* rows, int count, int width, float* out) {
    if constexpr (Kind::PACK == 1) {
        for (int key = 0; key < count; ++key) pack_row<Kind>(rows[key], width, out + key * VALUE_STRIDE);
    } else {
        for (int key = 0; key < count; key += 2)
            pack_pair(rows[key], key + 1 < count ? rows[key + 1] : nullptr, width, out + key / 2 * VALUE_STRIDE);
    }
}

// The tile of keys first .. first + count.
template <class Kind, class Q>
void pack_tile(const Target<Q>& target, int first, int count, Scratch& s) {
    using Operand = typename Kind::Operand;
    const Call& call = target.call;
    const int width = int(call.head_dim);
    int64_t slots[WIDE_KEYS];
    const Operand *rows[WIDE_KEYS], *next[WIDE_KEYS];
    Operand* room = reinterpret_cast<Operand*>(s.room);
    locate(target.plan, call, target.task, target.kv_head, first, count, slots);
    read_rows<0>(call.keys, slots, slots, count, width, room, width, rows, next);
    pack_keys<Kind>(rows, count, width, s.keys);
    read_rows<0>(call.values, slots, slots, count, width, room, width, rows, next);
    pack_values<Kind>(rows, count, width, s.values);
}

// The queries of WIDTH lanes from `first` on, turned so that a vector holds one element of each.
template <class Kind, class Q>
void pack_queries(const Target<Q>& target, int first, int count, Scratch& s) {
    const int width = int(target.call.head_dim), elements = (width + Kind::PACK - 1) / Kind::PACK;
    for (int lane = 0; lane < WIDTH; ++lane) {
        if (lane < count) pack_row<Kind>(target.query_row(first + lane), width, s.rows[lane]);
        else std::memset(s.rows[lane], 0, sizeof s.rows[lane]);
    }
    for (int at = 0; at < elements; at += WIDTH) {
        Vec block[WIDTH];
        for (int lane = 0; lane < WIDTH; ++lane) block[lane] = load(s.rows[lane] + at);
        transpose(block);
        for (int i = 0; i < WIDTH; ++i) store(&s.query[first / LANES][at + i][first % LANES], block[i]);
    }
}

inline Vec visible_only(Vec score, Ints key, Ints low, Ints high) {
    return (key >= low) & (key < high) ? score : splat(-INFINITY);
}

// Scores become what softmax exponentiates, in place, where that is more than a factor; then the largest is found.
template <int R>
void cap_mask_and_rank(Scratch& s, int v, int lane0, int first, int count, const Scoring& scoring, bool masked,
                       Vec* top) {
    for (int key = 0; key < count; ++key) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            float* place = &s.scores[key][(v + r) * WIDTH];
            Vec score = load(place);
            if (scoring.cap) score = splat(scoring.cap) * tanh(score * splat(scoring.before_cap));
            if (masked) {
                Ints low, high;
                std::memcpy(&low, s.low + lane0 + (v + r) * WIDTH, sizeof low);
                std::memcpy(&high, s.high + lane0 + (v + r) * WIDTH, sizeof high);
                score = visible_only(score, Ints{} + (first + key), low, high);
            }
            if (masked || scoring.cap) store(place, score);
            top[r] = larger(score, top[r]);
        }
    }
}

// One key's probabilities for R vectors of lanes, or two keys' as pairs.
template <class Kind, int R>
void exponentiate(Scratch& s, int v, int count, float exponent, const Vec* shift, Vec* total) {
    constexpr int DEGREE = Kind::PACK == 1 ? 6 : 4;
    for (int key = 0; key < count; key += Kind::PACK) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const int lane = (v + r) * WIDTH;
            const Vec p = exp2<DEGREE>(fma(load(&s.scores[key][lane]), splat(exponent), shift[r]));
            total[r] += p;
            if constexpr (Kind::PACK == 1) {
                store(&s.chances[key][lane], p);
            } else {
#if defined(__AVX512BF16__)
                Vec second{};
                if (key + 1 < count) second = exp2<DEGREE>(fma(load(&s.scores[key + 1][lane]), splat(exponent), shift[r]));
                total[r] += second;
                const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, p);
                const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                                       23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
                store(&s.chances[key / 2][lane], (Vec)_mm512_permutexvar_epi16(order, both));
#endif
            }
        }
    }
}

template <class Kind, int R>
void soften_vectors(Scratch& s, int v, int lane0, int first, int count, const Scoring& scoring, bool masked) {
    Vec top[R], shift[R], total[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) top[r] = load(s.largest + lane0 + (v + r) * WIDTH);
    cap_mask_and_rank<R>(s, v, lane0, first, count, scoring, masked, top);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        const int lane = (v + r) * WIDTH;
        const Vec correction = exp2<6>((load(s.largest + lane0 + lane) - top[r]) * splat(scoring.exponent));
        store(s.largest + lane0 + lane, top[r]);
        store(s.correction + lane, correction);
        shift[r] = -top[r] * splat(scoring.exponent);
        total[r] = load(s.total + lane0 + lane) * correction;
    }
    exponentiate<Kind, R>(s, v, count, scoring.exponent, shift, total);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) store(s.total + lane0 + (v + r) * WIDTH, total[r]);
}

// Softmax of a tile's scores under the largest so far: fills chances, correction, and brings largest and total up.
template <class Kind>
void soften(Scratch& s, int vectors, int lane0, int first, int count, const Scoring& scoring, bool masked) {
    int v = 0;
    for (; v + 4 <= vectors; v += 4) soften_vectors<Kind, 4>(s, v, lane0, first, count, scoring, masked);
    for (; v < vectors; ++v) soften_vectors<Kind, 1>(s, v, lane0, first, count, scoring, masked);
}

// LANES lanes over the packed tile of keys first .. first + count.
template <class Kind>
void attend_chunk(Scratch& s, int chunk, int vectors, int width, int first, int count, const Scoring& scoring,
                  bool masked, bool fresh) {
    const int elements = (width + Kind::PACK - 1) / Kind::PACK;
    product<Kind, KEY_STRIDE<Kind>, 1>(s.keys, s.query[chunk][0], elements, s.scores[0], nullptr, count, vectors);
    soften<Kind>(s, vectors, chunk * LANES, first, count, scoring, masked);
    product<Kind, 1, VALUE_STRIDE>(s.values, s.chances[0], (count + Kind::PACK - 1) / Kind::PACK, s.output[chunk][0],
                                   fresh ? nullptr : s.correction, width, vectors);
}

// Which keys the lanes of a chunk see.
struct Sight {
    int32_t lowest = INT32_MAX, highest_low = 0, lowest_high = INT32_MAX, highest = 0;
    bool fresh = true;
};

template <class Q>
Sight look(const Target<Q>& target, Scratch& s, int first, int lanes) {
    Sight sight;
    for (int lane = first; lane < first + LANES; ++lane) {
        target.visible(std::min(lane, lanes - 1), s.low[lane], s.high[lane]);
        sight.lowest = std::min(sight.lowest, s.low[lane]);
        sight.highest_low = std::max(sight.highest_low, s.low[lane]);
        sight.lowest_high = std::min(sight.lowest_high, s.high[lane]);
        sight.highest = std::max(sight.highest, s.high[lane]);
    }
    return sight;
}

template <class Q>
void write_out(const Target<Q>& target, Scratch& s, int first, int count, bool fresh, float exponent) {
    const int width = int(target.call.head_dim);
    const Vec total = load(s.total + first);
    const Vec inverse = total == Vec{} ? Vec{} : splat(1.0f) / total;
    Q* rows[WIDTH];
    for (int lane = 0; lane < count; ++lane)
        rows[lane] = target.output_row(first + lane, s.largest[first + lane] * exponent, s.total[first + lane]);
    for (int at = 0; at < width; at += WIDTH) {
        Vec block[WIDTH];
        for (int i = 0; i < WIDTH; ++i)
            block[i] = fresh ? Vec{} : load(&s.output[first / LANES][at + i][first % LANES]) * inverse;
        transpose(block);
        for (int lane = 0; lane < count; ++lane) {
            if (at + WIDTH <= width) store(rows[lane] + at, block[lane]);
            else store_part(rows[lane] + at, block[lane], width - at);
        }
    }
}

template <class Kind, class Q>
void attend(const Target<Q>& target) {
    Scratch& s = scratch();
    const Call& call = target.call;
    const Scoring scoring(call);
    const int width = int(call.head_dim), lanes = int(target.task.num_queries) * target.group;
    const int chunks = (lanes + LANES - 1) / LANES;
    Sight sights[MAX_LANES / LANES];
    int32_t begin = INT32_MAX, end = 0;
    for (int chunk = 0; chunk < chunks; ++chunk) {
        sights[chunk] = look(target, s, chunk * LANES, lanes);
        begin = std::min(begin, sights[chunk].lowest), end = std::max(end, sights[chunk].highest);
    }
    for (int lane = 0; lane < chunks * LANES; lane += WIDTH) {
        if (lane < lanes) pack_queries<Kind>(target, lane, std::min(WIDTH, lanes - lane), s);
        store(s.largest + lane, splat(NO_SCORE)), store(s.total + lane, Vec{});
    }
    for (int32_t first = begin; first < end; first += WIDE_KEYS) {
        const int count = std::min(WIDE_KEYS, end - first);
        pack_tile<Kind>(target, first, count, s);
        for (int chunk = 0; chunk < chunks; ++chunk) {
            Sight& sight = sights[chunk];
            const int seen = std::min(count, sight.highest - first);
            if (seen <= 0 || first + count <= sight.lowest) continue;
            const bool masked = first + seen > sight.lowest_high || first < sight.highest_low;
            const int vectors = std::min(LANES, (lanes - chunk * LANES + WIDTH - 1) / WIDTH * WIDTH) / WIDTH;
            attend_chunk<Kind>(s, chunk, vectors, width, first, seen, scoring, masked, sight.fresh);
            sight.fresh = false;
        }
    }
    for (int lane = 0; lane < lanes; lane += WIDTH)
        write_out(target, s, lane, std::min(WIDTH, lanes - lane), sights[lane / LANES].fresh, scoring.exponent);
}

}  // namespace

template <class Q>
void attend_wide(const Target<Q>& target) {
#if defined(__AVX512BF16__)
    if constexpr (sizeof(Q) == 2) return attend<Pairs>(target);
#endif
    return attend<Single>(target);
}

template void attend_wide(const Target<float>&);
template void attend_wide(const Target<bfloat16>&);

}  // namespace batchgen
