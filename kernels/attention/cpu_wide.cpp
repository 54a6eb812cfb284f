// Attention of many (query, head) lanes over a run of keys: a tile of keys and values is packed once and stays in the
// cache while the lanes pass. A vector holds one number of each of several lanes, so softmax needs no sideways sums.
#include <algorithm>
#include <memory>

#include "../native/sideways.h"
#include "cpu_wide.h"
#include "cpu_wide_codes.h"
#include "cpu_wide_numbers.h"
#include "cpu_wide_soften.h"

namespace batchgen {
namespace {

Scratch& scratch() {
    static thread_local std::unique_ptr<Scratch> mine(new Scratch);
    return *mine;
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

// The queries of WIDTH lanes from `first` on, turned so that a vector holds one element of each.
template <class Scores, class Q>
void pack_queries(const Target<Q>& target, int first, int count, Scratch& s) {
    const int width = int(target.call.head_dim);
    const void* rows[WIDTH];
    Scores::template bring_queries<Q>(first, count, width, s, rows);
    for (int at = 0; at < elements<typename Scores::Product>(width); at += WIDTH) {
        Vec block[WIDTH];
#pragma GCC unroll 16
        for (int lane = 0; lane < WIDTH; ++lane)
            block[lane] = lane < count ? load(static_cast<const float*>(rows[lane]) + at) : Vec{};
        transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; ++i) store(&s.query[first / LANES][at + i][first % LANES], block[i]);
    }
}

// Products with values join what stood there, multiplied by a factor of each lane, if any.
struct Outputs {
    const float* factor;
    static constexpr float* top = nullptr;

    static constexpr bool ranks() { return false; }
    Vec start(const float* out, int lane) const { return factor ? load(out) * load(factor + lane) : Vec{}; }
    Vec result(Vec sum, int) const { return sum; }
};

// LANES lanes over the packed tile of keys first .. first + count.
template <class Scores, class Values>
void attend_chunk(Scratch& s, int chunk, int vectors, int width, const Tile& tile, const Scoring& scoring, bool fresh) {
    using Keys = typename Scores::Product;
    std::memcpy(s.top, s.largest + chunk * LANES, sizeof s.top);
    const auto scores = Scores::ends(s, chunk * LANES, scoring.ranks(tile.masked) ? s.top : nullptr);
    const Outputs outputs{fresh ? nullptr : s.correction};
    const int depth = elements<Keys>(width), keys = elements<Values>(tile.count);
    product<Keys, KEY_STRIDE<Keys>, 1>(s.keys, s.query[chunk][0], depth, s.scores[0], scores, tile.count, vectors);
    soften<Values>(s, vectors, chunk * LANES, tile, scoring);
    product<Values, 1, VALUE_STRIDE>(s.values, s.chances[0], keys, s.output[chunk][0], outputs, width, vectors);
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
void write_out(const Target<Q>& target, Scratch& s, int first, int count, bool fresh, const Scoring& scoring) {
    const int width = int(target.call.head_dim);
    const Vec total = load(s.total + first), largest = load(s.largest + first) * exponents(s, first, scoring);
    Vec sinks{};
    for (int lane = first; lane < first + count; ++lane) {
        target.remember(s.partial[lane], largest[lane - first], s.total[lane]);
        sinks[lane - first] = target.sink(lane % target.group, s.partial[lane], largest[lane - first]);
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

template <class Scores, class Values, class Q>
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
        if (lane < lanes) pack_queries<Scores>(target, lane, std::min(WIDTH, lanes - lane), s);
        store(s.largest + lane, splat(NO_SCORE)), store(s.total + lane, Vec{});
    }
    for (int32_t first = begin; first < end; first += WIDE_KEYS) {
        const int count = std::min(WIDE_KEYS, end - first);
        int64_t slots[WIDE_KEYS];
        locate(target.plan, call, target.task, target.kv_head, first, count, slots);
        Scores::pack_keys(call.keys, slots, count, width, s);
        pack_values<Values>(call.values, slots, count, width, s);
        for (int chunk = 0; chunk < chunks; ++chunk) {
            Sight& sight = sights[chunk];
            const int seen = std::min(count, sight.highest - first);
            if (seen <= 0 || first + count <= sight.lowest) continue;
            const bool masked = first + seen > sight.lowest_high || first < sight.highest_low;
            const int vectors = std::min(LANES, (lanes - chunk * LANES + WIDTH - 1) / WIDTH * WIDTH) / WIDTH;
            attend_chunk<Scores, Values>(s, chunk, vectors, width, {first, seen, masked}, scoring, sight.fresh);
            sight.fresh = false;
        }
    }
    for (int lane = 0; lane < lanes; lane += WIDTH)
        write_out(target, s, lane, std::min(WIDTH, lanes - lane), sights[lane / LANES].fresh, scoring);
}

}  // namespace

template <class Q>
void attend_wide(const Target<Q>& target) {
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
    if constexpr (sizeof(Q) == 2) {
        if (target.call.keys.format == KV_INT8) return attend<Codes, Pairs>(target);
        return attend<Numbers<Pairs>, Pairs>(target);
    }
#endif
    return attend<Numbers<Single>, Single>(target);
}

template void attend_wide(const Target<float>&);
template void attend_wide(const Target<bfloat16>&);

}  // namespace batchgen
