// Outputs that are drawn from as they are computed and kept nowhere; see the contract of `draw`. Knows what the threads
// that find them have in common, not how they are computed.
#pragma once

#include <atomic>
#include <new>

#include "../sampling/cpu.h"
#include "frame.h"

namespace batchgen {

// A batch and what is drawn from its products; the fields stand in the same order in native.py.
struct DrawCall {
    Call product;              // `out` is not used; with `out_bfloat16` outputs are rounded before they are compared
    const float* temperature;  // [tokens]
    const int64_t* keys;       // [tokens, 2]
    int64_t* drawn;            // [tokens]
    uint8_t* finite;           // [tokens]
};

// The draw of one token under way. Best is what is largest as a whole number: above a value, below its id turned round,
// so that among equals the lowest id wins, in whatever order threads come upon them.
class Draw {
public:
    Draw(float temperature, const int64_t* key)
        : temperature_(temperature), first_(uint32_t(key[0])), second_(uint32_t(key[1])) {}

    // Outputs from `id` on, the first `count` of them.
    BATCHGEN_INLINE void offer(Vec x, int32_t id, int64_t count) {
        const float reached = value_of(best_.load(std::memory_order_relaxed));
        if (temperature_ == 0 ? any(~(x < splat(reached))) : may_win(x, id, reached)) consider(x, id, count);
    }

    bool finite() const { return best_ != NOTHING && best_ != BROKEN; }
    int64_t id() const { return finite() ? int64_t(uint32_t(~best_.load())) : 0; }

private:
    static constexpr uint64_t NOTHING = 0x007fffffull << 32;  // less than any id at -inf
    static constexpr uint64_t BROKEN = ~0ull;                 // by an output that is NaN or +inf

    // Floats in their order as whole numbers, and back.
    static uint64_t rank(float value, int32_t id) {
        uint32_t bits;
        value += 0.0f;  // no -0, which would be less than 0
        std::memcpy(&bits, &value, sizeof bits);
        bits = bits >> 31 ? ~bits : bits | 0x80000000;
        return uint64_t(bits) << 32 | uint32_t(~id);
    }

    static float value_of(uint64_t rank) {
        uint32_t bits = uint32_t(rank >> 32);
        bits = bits >> 31 ? bits ^ 0x80000000 : ~bits;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }

    Vec chance(int32_t id) const { return uniform(mix((mix((Words)(from_zero() + id)) ^ first_) + second_)); }

    bool may_win(Vec x, int32_t id, float reached) const {
        return any(~(chance(id) > chance_of(x / splat(temperature_), reached)));
    }

    __attribute__((noinline)) void consider(Vec x, int32_t id, int64_t count) {
        const Vec values = temperature_ == 0 ? x : x / splat(temperature_) + gumbel(chance(id));
        uint64_t known = best_.load(std::memory_order_relaxed), best = known;
        for (int lane = 0; lane < WIDTH && lane < count; ++lane) {
            const uint64_t offered = x[lane] < INFINITY ? rank(values[lane], id + lane) : BROKEN;
            if (x[lane] != -INFINITY && offered > best) best = offered;
        }
        while (known < best && !best_.compare_exchange_weak(known, best, std::memory_order_relaxed)) {}
    }

    std::atomic<uint64_t> best_{NOTHING};
    float temperature_;
    uint32_t first_, second_;
};

// Results of a product whose `out` are the draws of its tokens.
template <>
struct Results<Draw> {
    template <int T, int P>
    static void ask(const Call&, int64_t, int64_t) {}

    static void put(const Call& call, int64_t token, int64_t first, const Values& values, int64_t count) {
        Draw& draw = static_cast<Draw*>(call.out)[token];
#pragma GCC unroll 8
        for (int part = 0; part < PARTS; ++part) {
            const Vec x = call.out_bfloat16 ? rounded<bfloat16>(values.part[part]) : values.part[part];
            if (part * WIDTH < count) draw.offer(x, int32_t(first + part * WIDTH), count - part * WIDTH);
        }
    }
};

struct ForDraws;

// multiply(product) with draws in place of results.
template <class Multiply>
void draw_each(const DrawCall& call, const Multiply& multiply) {
    Call product = call.product;
    Draw* draws = reinterpret_cast<Draw*>(room<ForDraws>(product.tokens * int64_t(sizeof(Draw))));
    for (int64_t token = 0; token < product.tokens; ++token)
        new (draws + token) Draw(call.temperature[token], call.keys + 2 * token);
    product.out = draws;
    multiply(product);
    for (int64_t token = 0; token < product.tokens; ++token)
        call.drawn[token] = draws[token].id(), call.finite[token] = draws[token].finite();
}

}  // namespace batchgen
