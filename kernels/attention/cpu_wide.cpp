// Attention of many (query, head) lanes over a run of keys: a tile of keys and values is packed once and stays in the
// cache while the lanes pass. A vector holds one number of each of several lanes, so softmax needs no sideways sums.
#include <algorithm>
#include <memory>
#include <type_traits>

#include "../native/scratch.h"
#include "cpu.h"
#include "cpu_product.h"

namespace batchgen {
namespace {

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
    float largest[MAX_LANES], total[MAX_LANES], top[LANES], correction[LANES];
    int32_t low[MAX_LANES], high[MAX_LANES];  // the visible keys
    const void* query_row[MAX_LANES];
    void* output_row[MAX_LANES];
    int64_t partial[MAX_LANES];  // whose weight is to be remembered, or -1
};

Scratch& scratch() {
    static thread_local std::unique_ptr<Scratch> mine(new Scratch);
    return *mine;
}

template <class T>
inline void copy_row(const T* from, int width, T* to) {
    constexpr int STEP = CACHE_LINE / int(sizeof(T));
    int at = 0;
    for (; at + STEP <= width; at += STEP) std::memcpy(to + at, from + at, CACHE_LINE);
    if (at < width) std::memcpy(to + at, from + at, (width - at) * sizeof(T));
}

// A row of numbers as elements of the kind; an odd last bfloat16 is paired with zero.
template <class Kind, class T>
void pack_row(const T* row, int width, float* out) {
    using Operand = typename Kind::Operand;
    Operand* to = reinterpret_cast<Operand*>(out);
    if constexpr (std::is_same_v<Operand, T>) copy_row(row, width, to);
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
    const Operand* rows[WIDE_KEYS];
    Operand* room = reinterpret_cast<Operand*>(s.room);
    locate(target.plan, call, target.task, target.kv_head, first, count, slots);
    read_rows(call.keys, slots, count, width, room, width, rows);
    pack_keys<Kind>(rows, count, width, s.keys);
    read_rows(call.values, slots, count, width, room, width, rows);
    pack_values<Kind>(rows, count, width, s.values);
}

// Where the lanes of the task read and write and which keys they see; those that fill the last chunk see as the last.
template <class Q>
void place_lanes(const Target<Q>& target, int lanes, Scratch& s) {
    int lane = 0;
    for (int query = 0; query < target.task.num_queries; ++query) {
        int32_t low, high;
        target.visible(query, low, high);
        for (int member = 0; member < target.group; ++member, ++lane) {
            s.query_row[lane] = target.query_row(query, member);
            s.output_row[lane] = target.output_row(query, member, s.partial[lane]);
            s.low[lane] = low, s.high[lane] = high;
        }
    }
    for (; lane % LANES; ++lane) s.low[lane] = s.low[lanes - 1], s.high[lane] = s.high[lanes - 1];
}

// Elements of a query from `at` on: where they lie, if they are whole vectors as they lie, else from the packed row.
template <class Kind, class Q>
inline Vec load_elements(const Scratch& s, int lane, int at, bool direct) {
    const void* row = direct ? s.query_row[lane] : s.rows[lane % WIDTH];
    return load(static_cast<const float*>(row) + at);
}

// The queries of WIDTH lanes from `first` on, turned so that a vector holds one element of each.
template <class Kind, class Q>
void pack_queries(const Target<Q>& target, int first, int count, Scratch& s) {
    const int width = int(target.call.head_dim), elements = (width + Kind::PACK - 1) / Kind::PACK;
    const bool direct = std::is_same_v<typename Kind::Operand, Q> && width % (WIDTH * Kind::PACK) == 0;
    for (int lane = 0; lane < count && !direct; ++lane)
        pack_row<Kind>(static_cast<const Q*>(s.query_row[first + lane]), width, s.rows[lane]);
    for (int at = 0; at < elements; at += WIDTH) {
        Vec block[WIDTH];
#pragma GCC unroll 16
        for (int lane = 0; lane < WIDTH; ++lane)
            block[lane] = lane < count ? load_elements<Kind, Q>(s, first + lane, at, direct) : Vec{};
        transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; ++i) store(&s.query[first / LANES][at + i][first % LANES], block[i]);
    }
}

inline Vec visible_only(Vec score, Ints key, Ints low, Ints high) {
    return (key >= low) & (key < high) ? score : splat(-INFINITY);
}

// A tile of keys as the scores see it.
struct Tile {
    int first, count;
    bool masked;
};

// Scores become what softmax exponentiates, in place, where that is more than a factor; then the largest is found.
template <int R>
void cap_mask_and_rank(Scratch& s, int v, int lane0, const Tile& tile, const Scoring& scoring, Vec* top) {
    for (int key = 0; key < tile.count; ++key) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            float* place = &s.scores[key][(v + r) * WIDTH];
            Vec score = load(place);
            if (scoring.cap) score = splat(scoring.cap) * tanh(score * splat(scoring.before_cap));
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
template <class Kind, int R>
struct Softening {
    Scratch& s;
    int v;
    float exponent;
    Vec shift[R], total[R];

    Vec chance(int key, int r) const {
        const Vec power = fma(load(&s.scores[key][(v + r) * WIDTH]), splat(exponent), shift[r]);
        return Kind::PACK == 1 ? exp2<6>(power) : exp2_rough(power);
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
        if constexpr (Kind::PACK == 1)
            for (; key < count; ++key) single(key);
        for (; key + 2 <= count; key += 2) pair<true>(key);
        if (key < count) pair<false>(key);
    }
};

template <class Kind, int R>
void soften_vectors(Scratch& s, int v, int lane0, const Tile& tile, const Scoring& scoring) {
    Softening<Kind, R> soft{s, v, scoring.exponent};
    Vec top[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) top[r] = load(s.top + (v + r) * WIDTH);
    if (!scoring.ranks(tile.masked)) cap_mask_and_rank<R>(s, v, lane0, tile, scoring, top);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        const int lane = (v + r) * WIDTH;
        const Vec correction = exp2<6>((load(s.largest + lane0 + lane) - top[r]) * splat(scoring.exponent));
        store(s.largest + lane0 + lane, top[r]);
        store(s.correction + lane, correction);
        soft.shift[r] = -top[r] * splat(scoring.exponent);
        soft.total[r] = load(s.total + lane0 + lane) * correction;
    }
    soft.all(tile.count);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) store(s.total + lane0 + (v + r) * WIDTH, soft.total[r]);
}

// Softmax of a tile's scores under the largest so far: fills chances, correction, and brings largest and total up.
template <class Kind>
void soften(Scratch& s, int vectors, int lane0, const Tile& tile, const Scoring& scoring) {
    int v = 0;
    for (; v + 4 <= vectors; v += 4) soften_vectors<Kind, 4>(s, v, lane0, tile, scoring);
    for (; v < vectors; ++v) soften_vectors<Kind, 1>(s, v, lane0, tile, scoring);
}

// LANES lanes over the packed tile of keys first .. first + count.
template <class Kind>
void attend_chunk(Scratch& s, int chunk, int vectors, int width, const Tile& tile, const Scoring& scoring, bool fresh) {
    const int elements = (width + Kind::PACK - 1) / Kind::PACK, pairs = (tile.count + Kind::PACK - 1) / Kind::PACK;
    std::memcpy(s.top, s.largest + chunk * LANES, sizeof s.top);
    const Besides ranking{nullptr, scoring.ranks(tile.masked) ? s.top : nullptr};
    const Besides rescaling{fresh ? nullptr : s.correction, nullptr};
    product<Kind, KEY_STRIDE<Kind>, 1>(s.keys, s.query[chunk][0], elements, s.scores[0], ranking, tile.count, vectors);
    soften<Kind>(s, vectors, chunk * LANES, tile, scoring);
    product<Kind, 1, VALUE_STRIDE>(s.values, s.chances[0], pairs, s.output[chunk][0], rescaling, width, vectors);
}

// Which keys the lanes of a chunk see.
struct Sight {
    int32_t lowest = INT32_MAX, highest_low = 0, lowest_high = INT32_MAX, highest = 0;
    bool fresh = true;
};

Sight look(const Scratch& s, int first) {
    Sight sight;
    for (int lane = first; lane < first + LANES; ++lane) {
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
    Vec sinks{};
    for (int lane = first; lane < first + count; ++lane) {
        const float largest = s.largest[lane] * exponent;
        target.remember(s.partial[lane], largest, s.total[lane]);
        sinks[lane - first] = target.sink(lane % target.group, s.partial[lane], largest);
    }
    const Vec inverse = total == Vec{} ? Vec{} : splat(1.0f) / (total + sinks);
    for (int at = 0; at < width; at += WIDTH) {
        Vec block[WIDTH];
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; ++i)
            block[i] = fresh ? Vec{} : load(&s.output[first / LANES][at + i][first % LANES]) * inverse;
        transpose(block);
        const int64_t left = width - at;
        for (int lane = 0; lane < count; ++lane) {
            Q* row = static_cast<Q*>(s.output_row[first + lane]) + at;
            if (left >= WIDTH) store(row, block[lane]);
            else store_part(row, block[lane], int(left));
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
    place_lanes(target, lanes, s);
    Sight sights[MAX_LANES / LANES];
    int32_t begin = INT32_MAX, end = 0;
    for (int chunk = 0; chunk < chunks; ++chunk) {
        sights[chunk] = look(s, chunk * LANES);
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
            attend_chunk<Kind>(s, chunk, vectors, width, {first, seen, masked}, scoring, sight.fresh);
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
