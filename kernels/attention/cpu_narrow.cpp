// Attention of few (query, head) lanes a head over a run of keys: every key is read once, in place, for all lanes.
// All heads of a task pass a tile of keys before the next. While its keys are scored its values are fetched, and while
// these are gathered the keys of the next tile, at last the first of the next task.
#include <algorithm>
#include <memory>

#include "../native/sideways.h"
#include "cpu_narrow.h"
#include "cpu_narrow_walk.h"
#include "cpu_narrow_ways.h"

namespace batchgen {
namespace {

// The lanes of a task on their way along its keys.
template <class Plain, class Q>
class Lanes {
public:
    Lanes(Scratch& s, const Target<Q>& target)
        : s_(s), target_(target), call_(target.call), scoring_(target.call), width_(int(target.call.head_dim)),
          heads_(int(target.task.num_heads)), of_head_(int(target.task.num_queries) * target.group),
          part_(part_of(of_head_)), lanes_(of_head_ * heads_),
          ways_(choose<Plain, Q>(target.call, part_, of_head_ % part_)) {
        for (int lane = 0; lane < lanes_; ++lane) begin(lane);
    }

    void attend(const Tile& tile, const Tile& next) {
        for (int strip = 0; strip < tile.count; ++strip)
            for (int head = 0; head < heads_; ++head) {
                Rows keys = place(call_.keys, ways_.keys, tile.strips[strip], head, 0);
                keys.ahead = look_ahead(call_.values, tile, strip * heads_ + head, tile.count * heads_);
                score(head, strip, keys);
            }
        soften(tile);
        for (int head = 0; head < heads_; ++head) {
            Rows values[STRIPS];
            for (int strip = 0; strip < tile.count; ++strip) {
                values[strip] = place(call_.values, ways_.values, tile.strips[strip], head, strip);
                values[strip].ahead = look_ahead(call_.keys, next, head * tile.count + strip, tile.count * heads_);
            }
            gather(head, values, tile.count);
        }
    }

    void write_out() const {
        for (int lane = 0; lane < lanes_; ++lane) {
            int64_t partial;
            Q* out = at_head(lane).output_row(query(lane), member(lane), partial);
            const float total = sum(load(s_.total[lane]));
            target_.remember(partial, s_.largest[lane] * scoring_.exponent, total);
            const float sink = at_head(lane).sink(member(lane), partial, s_.largest[lane] * scoring_.exponent);
            const Vec inverse = splat(total ? 1 / (total + sink) : 0.0f);
            ways_.arrange(s_.output[lane], width_);
            int at = 0;
            for (; at + WIDTH <= width_; at += WIDTH) store(out + at, load(s_.output[lane] + at) * inverse);
            if (at < width_) store_part(out + at, load(s_.output[lane] + at) * inverse, width_ - at);
        }
    }

private:
    // Lanes of a head that pass a key together: as many as there is room for, in equal parts.
    static int part_of(int lanes) {
        const int parts = (lanes + PART_LANES - 1) / PART_LANES;
        return (lanes + parts - 1) / parts;
    }

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

    // The rows of a head, where they lie or brought to the room of `strip`.
    Rows place(const Stored& all, const Way& way, const Strip& from, int head, int strip) {
        const Stored stored = of_head(all, head);
        const float* scales = stored.num_scales == 1 ? place_scales(stored, from, s_.scales[strip]) : nullptr;
        if (way.in_place && from.side_by_side)
            return {stored.codes + from.slots[0] * stored.row_bytes, scales, {}};
        char* made = reinterpret_cast<char*>(s_.rows) + strip * STRIP * width_ * way.bytes;
        way.bring(stored, from.slots, width_, made);
        return {made, scales, {}};
    }

    static const float* place_scales(const Stored& stored, const Strip& from, float* room) {
        if (from.side_by_side) return stored.scales + from.slots[0];
        for (int key = 0; key < STRIP; ++key) room[key] = stored.scales[from.slots[key]];
        return room;
    }

    void score(int head, int strip, const Rows& keys) {
        each_part(head, [&](const Part& part, int lane) { part.score(s_, lane, keys, strip, width_); });
    }

    void gather(int head, const Rows* values, int strips) {
        each_part(head, [&](const Part& part, int lane) { part.gather(s_, lane, values, strips, width_); });
    }

    template <class Body>
    void each_part(int head, const Body& body) {
        int lane = head * of_head_;
        const int end = lane + of_head_;
        for (; lane + part_ <= end; lane += part_) body(ways_.whole, lane);
        if (lane < end) body(ways_.rest, lane);
    }

    Stored of_head(Stored stored, int head) const {
        const int64_t rows = head * call_.head_step;
        stored.codes += rows * stored.row_bytes, stored.scales += rows * stored.num_scales;
        return stored;
    }

    // What step `index` of `steps` fetches of a tile, in the order in which it lies: a strip of a head is left to the
    // products, the scales, and what else falls to the step where tiles differ in size, are fetched at once.
    BATCHGEN_INLINE Ahead look_ahead(const Stored& all, const Tile& tile, int index, int steps) const {
        const int pieces = tile.count * heads_;
        Ahead ahead;
        for (int i = pieces * index / steps; i < pieces * (index + 1) / steps; ++i) {
            prefetch(ahead.rows, ahead.count * ahead.row_bytes);
            const Strip& strip = tile.strips[i / heads_];
            const Stored stored = of_head(all, i % heads_);
            const int64_t first = strip.slots[0];
            prefetch(stored.scales + first * stored.num_scales, strip.count * stored.num_scales * sizeof(float));
            ahead = {stored.codes + first * stored.row_bytes, stored.row_bytes, strip.count};
        }
        return ahead;
    }

    // Softmax of the scores of a tile under the largest so far.
    void soften(const Tile& tile) {
        const int keys = tile.count * STRIP;
        if (!scoring_.ranks(tile.first < highest_low_ || tile.first + keys > lowest_high_)) {
            for (int lane = 0; lane < lanes_; ++lane) cap_and_hide(lane, tile.first, keys);
        }
        for (int lane = 0; lane < lanes_; lane += WIDTH) {
            Vec tops[WIDTH];
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; ++i) tops[i] = largest_of_lane(lane + i, keys);
            const Vec before = load(s_.largest + lane), now = larger(largest_each(tops), before);
            store(s_.correction + lane, exp2<6>((before - now) * splat(scoring_.exponent)));
            store(s_.largest + lane, now);
            store(s_.shift + lane, now * splat(-scoring_.exponent));
        }
        for (int lane = 0; lane < lanes_; ++lane) {
            Vec total = load(s_.total[lane]) * splat(s_.correction[lane]);
            for (int at = 0; at < keys; at += WIDTH) {
                const Vec score = load(s_.scores[lane] + at);
                const Vec p = Plain::power(fma(score, splat(scoring_.exponent), splat(s_.shift[lane])));
                store(s_.chances[lane] + at, p);
                total += p;
            }
            store(s_.total[lane], total);
        }
    }

    Vec largest_of_lane(int lane, int keys) const {
        Vec top = load(s_.scores[lane]);
        for (int at = WIDTH; at < keys; at += WIDTH) top = larger(load(s_.scores[lane] + at), top);
        return top;
    }

    void cap_and_hide(int lane, int first, int keys) {
        for (int at = 0; at < keys; at += WIDTH) {
            Vec score = load(s_.scores[lane] + at);
            if (scoring_.cap) score = splat(scoring_.cap) * tanh(score * splat(scoring_.before_cap));
            const Ints key = from_zero() + (first + at);
            score = (key >= s_.low[lane]) & (key < s_.high[lane]) ? score : splat(-INFINITY);
            store(s_.scores[lane] + at, score);
        }
    }

    Scratch& s_;
    const Target<Q>& target_;
    const Call& call_;
    const Scoring scoring_;
    const int width_, heads_, of_head_, part_, lanes_;
    const Ways<Q> ways_;
    int32_t highest_low_ = 0, lowest_high_ = INT32_MAX;
};

// Zeros at first: what vectors hold beside the lanes of a task are numbers.
Scratch& scratch() {
    static thread_local std::unique_ptr<Scratch> mine(new Scratch());
    return *mine;
}

template <class Plain, class Q>
void attend(const Target<Q>& target, const Target<Q>* after) {
    Lanes<Plain, Q> lanes(scratch(), target);
    Walk<Q> walk(target, after);
    for (int step = 0; step < walk.tiles(); ++step) {
        const Tile& next = walk.look_ahead(step);
        lanes.attend(walk.at(step), next);
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
