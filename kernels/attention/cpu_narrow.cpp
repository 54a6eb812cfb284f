// Attention of one or a few (query, head) lanes a head over a run of keys: every key is read once, in place, for all
// lanes. A vector holds neighbouring numbers of one key. All heads of a task pass a tile of keys before the next: so what
// is read lies in long runs. What comes two tiles later, at last the first keys of the next task, is fetched meanwhile.
#include <algorithm>
#include <memory>

#include "cpu_narrow.h"
#include "cpu_narrow_codes.h"
#include "cpu_narrow_plain.h"
#include "cpu_narrow_walk.h"

namespace batchgen {
namespace {

// The rows at `slots` in order, as numbers of type O; scales of whole rows are multiplied later.
template <class Format, int FIXED, class O>
void convert(const Stored& stored, const int64_t* slots, int given, O* out) {
    const int width = FIXED ? FIXED : given;
    const float one = 1;
    for (int key = 0; key < TILE; ++key) {
        const float* scales = stored.num_scales > 1 ? stored.scales + slots[key] * stored.num_scales : &one;
        Format::row(stored.codes + slots[key] * stored.row_bytes, scales, width, out + key * width);
    }
}

template <class O>
using Convert = void(const Stored&, const int64_t* slots, int width, O* out);

// How rows of a format become numbers of type O.
template <int FIXED, class O>
Convert<O>* converter(int64_t format) {
#if defined(__AVX512BF16__)
    if constexpr (FIXED && sizeof(O) == 2)
        if (format == KV_FP8) return convert<Float8Pairs, FIXED, O>;
#endif
    switch (format) {
        case KV_FLOAT32: return convert<ReadPlain<float>, FIXED, O>;
        case KV_BFLOAT16: return convert<ReadPlain<bfloat16>, FIXED, O>;
        case KV_FP8: return convert<ReadScaled<ReadFloat8>, FIXED, O>;
        case KV_INT8: return convert<ReadScaled<ReadInt8>, FIXED, O>;
        default: return convert<ReadInt4, FIXED, O>;
    }
}

// How a task reads its keys and values; chosen by their formats, the lanes of a head and the width.
template <class Plain, class Q>
struct Ways {
    void (*keep_query)(Scratch&, int lane, const Q* row, int width);
    void (*score)(Scratch&, int lane, const Strip& keys, int width);
    void (*gather)(Scratch&, int lane, const Strip& values, int width);
    Vec (*result)(const float* sums, int at);
    Convert<typename Plain::Operand> *convert_keys, *convert_values;  // null: read in place
};

template <class Plain, int N, int FIXED, class Q>
Ways<Plain, Q> choose(const Call& call) {
    using Operand = typename Plain::Operand;
    const auto conversion = [](int64_t format) {
        return format == plain_format(static_cast<Operand*>(nullptr)) ? nullptr : converter<FIXED, Operand>(format);
    };
    Ways<Plain, Q> ways{Plain::keep_query, Plain::template score<N, FIXED>, Plain::template gather<N, FIXED>,
                        Plain::result,     conversion(call.keys.format),    conversion(call.values.format)};
#if defined(__AVX512VNNI__)
    if constexpr (sizeof(Q) == 2) {
        const bool lines = call.head_dim % Codes::LINE == 0;
        if (lines && call.keys.format == KV_INT8)
            ways.keep_query = Codes::keep_query, ways.score = Codes::score<N, FIXED>, ways.convert_keys = nullptr;
        if (lines && call.values.format == KV_INT8)
            ways.gather = Codes::gather<N, FIXED>, ways.result = Codes::result, ways.convert_values = nullptr;
    }
#endif
    return ways;
}

template <class Plain, int N, class Q>
Ways<Plain, Q> choose_width(const Call& call) {
    switch (call.head_dim) {
        case 64: return choose<Plain, N, 64, Q>(call);
        case 128: return choose<Plain, N, 128, Q>(call);
        default: return choose<Plain, N, 0, Q>(call);
    }
}

template <class Plain, class Q>
Ways<Plain, Q> choose_lanes(const Call& call, int lanes) {
    static_assert(NARROW_LANES == 4);
    switch (lanes) {
        case 1: return choose_width<Plain, 1, Q>(call);
        case 2: return choose_width<Plain, 2, Q>(call);
        case 3: return choose_width<Plain, 3, Q>(call);
        default: return choose_width<Plain, 4, Q>(call);
    }
}

inline void copy(const Stored& stored, const int64_t* slots, char* out) {
    for (int key = 0; key < TILE; ++key)
        std::memcpy(out + key * stored.row_bytes, stored.codes + slots[key] * stored.row_bytes, stored.row_bytes);
}

// The lanes of a task on their way along its keys.
template <class Plain, class Q>
class Lanes {
public:
    Lanes(Scratch& s, const Target<Q>& target)
        : s_(s), target_(target), call_(target.call), scoring_(target.call), width_(int(target.call.head_dim)),
          of_head_(int(target.task.num_queries) * target.group), lanes_(of_head_ * int(target.task.num_heads)),
          ways_(choose_lanes<Plain, Q>(target.call, of_head_)) {
        for (int lane = 0; lane < lanes_; ++lane) begin(lane);
        for (int lane = lanes_; lane % WIDTH; ++lane)
            for (int key = 0; key < TILE; ++key) s.scores[lane][key] = s.largest[lane] = NO_SCORE;
    }

    void attend(const Tile& tile, const Tile& ahead) {
        for (int head = 0; head < target_.task.num_heads; ++head)
            ways_.score(s_, head * of_head_, strip(call_.keys, head, tile, ahead, ways_.convert_keys), width_);
        soften(tile);
        for (int head = 0; head < target_.task.num_heads; ++head)
            ways_.gather(s_, head * of_head_, strip(call_.values, head, tile, ahead, ways_.convert_values), width_);
    }

    void write_out() const {
        for (int lane = 0; lane < lanes_; ++lane) {
            int64_t partial;
            Q* out = at_head(lane).output_row(query(lane), member(lane), partial);
            const float total = sum(load(s_.total[lane]));
            target_.remember(partial, s_.largest[lane] * scoring_.exponent, total);
            const float sink = at_head(lane).sink(member(lane), partial, s_.largest[lane] * scoring_.exponent);
            const Vec inverse = splat(total ? 1 / (total + sink) : 0.0f);
            for (int at = 0; at < width_; at += WIDTH) {
                const Vec part = ways_.result(s_.output[lane], at) * inverse;
                if (at + WIDTH <= width_) store(out + at, part);
                else store_part(out + at, part, width_ - at);
            }
        }
    }

private:
    using Operand = typename Plain::Operand;

    int query(int lane) const { return lane % of_head_ / target_.group; }
    int member(int lane) const { return lane % target_.group; }

    Target<Q> at_head(int lane) const {
        Target<Q> target = target_;
        target.kv_head += lane / of_head_;
        return target;
    }

    void begin(int lane) {
        target_.visible(query(lane), s_.low[lane], s_.high[lane]);
        ways_.keep_query(s_, lane, at_head(lane).query_row(query(lane), member(lane)), width_);
        std::memset(s_.output[lane], 0, (width_ + 2 * WIDTH) * sizeof(float));  // vectors at the edge reach beyond
        std::memset(s_.total[lane], 0, sizeof s_.total[lane]);
        s_.largest[lane] = NO_SCORE;
        highest_low_ = std::max(highest_low_, s_.low[lane]), lowest_high_ = std::min(lowest_high_, s_.high[lane]);
    }

    Strip strip(const Stored& all, int head, const Tile& tile, const Tile& ahead, Convert<Operand>* convert) {
        const int64_t rows = head * call_.head_step;
        Stored stored = all;
        stored.codes += rows * stored.row_bytes, stored.scales += rows * stored.num_scales;
        const char* next = stored.codes + ahead.slots[0] * stored.row_bytes;
        const float* scales = place_scales(stored, tile, ahead);
        if (!convert && tile.side_by_side) return {stored.codes + tile.slots[0] * stored.row_bytes, next, scales};
        char* made = reinterpret_cast<char*>(s_.rows);
        if (convert) convert(stored, tile.slots, width_, reinterpret_cast<Operand*>(made));
        else copy(stored, tile.slots, made);
        prefetch(next, TILE * stored.row_bytes);
        return {made, made, scales};
    }

    const float* place_scales(const Stored& stored, const Tile& tile, const Tile& ahead) {
        for (int key : {0, TILE - 1}) __builtin_prefetch(stored.scales + ahead.slots[key] * stored.num_scales, 0, 3);
        if (stored.num_scales != 1) return nullptr;
        if (tile.side_by_side) return stored.scales + tile.slots[0];
        for (int key = 0; key < TILE; ++key) s_.scales[key] = stored.scales[tile.slots[key]];
        return s_.scales;
    }

    // Softmax of the scores of a tile under the largest so far.
    void soften(const Tile& tile) {
        if (!scoring_.ranks(tile.first < highest_low_ || tile.first + TILE > lowest_high_)) {
            for (int lane = 0; lane < lanes_; ++lane) cap_and_hide(lane, tile);
        }
        for (int lane = 0; lane < lanes_; lane += WIDTH) {
            Vec tops[WIDTH];
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; ++i) tops[i] = largest_of_lane(lane + i);
            const Vec before = load(s_.largest + lane), now = larger(largest_each(tops), before);
            store(s_.correction + lane, exp2<6>((before - now) * splat(scoring_.exponent)));
            store(s_.largest + lane, now);
            store(s_.shift + lane, now * splat(-scoring_.exponent));
        }
        for (int lane = 0; lane < lanes_; ++lane) {
            Vec total = load(s_.total[lane]) * splat(s_.correction[lane]);
#pragma GCC unroll 4
            for (int at = 0; at < TILE; at += WIDTH) {
                const Vec score = load(s_.scores[lane] + at);
                const Vec p = Plain::power(fma(score, splat(scoring_.exponent), splat(s_.shift[lane])));
                store(s_.chances[lane] + at, p);
                total += p;
            }
            store(s_.total[lane], total);
        }
    }

    Vec largest_of_lane(int lane) const {
        Vec top = load(s_.scores[lane]);
        for (int at = WIDTH; at < TILE; at += WIDTH) top = larger(load(s_.scores[lane] + at), top);
        return top;
    }

    void cap_and_hide(int lane, const Tile& tile) {
        for (int at = 0; at < TILE; at += WIDTH) {
            Vec score = load(s_.scores[lane] + at);
            if (scoring_.cap) score = splat(scoring_.cap) * tanh(score * splat(scoring_.before_cap));
            const Ints key = from_zero() + (tile.first + at);
            score = (key >= s_.low[lane]) & (key < s_.high[lane]) ? score : splat(-INFINITY);
            store(s_.scores[lane] + at, score);
        }
    }

    Scratch& s_;
    const Target<Q>& target_;
    const Call& call_;
    const Scoring scoring_;
    const int width_, of_head_, lanes_;
    const Ways<Plain, Q> ways_;
    int32_t highest_low_ = 0, lowest_high_ = INT32_MAX;
};

Scratch& scratch() {
    static thread_local std::unique_ptr<Scratch> mine(new Scratch);
    return *mine;
}

template <class Plain, class Q>
void attend(const Target<Q>& target, const Target<Q>* after) {
    Lanes<Plain, Q> lanes(scratch(), target);
    Walk<Q> walk(target, after);
    for (int step = 0; step < walk.tiles(); ++step) {
        const Tile& ahead = walk.look_ahead(step);
        lanes.attend(walk.at(step), ahead);
    }
    lanes.write_out();
}

}  // namespace

template <class Q>
void attend_narrow(const Target<Q>& target, const Target<Q>* after) {
#if defined(__AVX512BF16__)
    if constexpr (sizeof(Q) == 2) return attend<Pairs>(target, after);
#endif
    return attend<Single>(target, after);
}

template void attend_narrow(const Target<float>&, const Target<float>*);
template void attend_narrow(const Target<bfloat16>&, const Target<bfloat16>*);

}  // namespace batchgen
