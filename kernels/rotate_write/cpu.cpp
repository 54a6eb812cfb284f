// Heads turned by position; keys and values of the fed tokens into their slots, as codes and scales. See the contracts
// of the op and of the formats.
#include <algorithm>
#include <limits>
#include <type_traits>

#include "../kv_format/cpu.h"
#include "../native/export.h"
#include "../native/parallel.h"
#include "../native/sideways.h"
#include "turn.h"

namespace batchgen {
namespace {

constexpr float LARGEST = 0x1p126f, SMALLEST = 0x1p-100f;
constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

struct Scale {
    float scale, factor;

    // Of codes up to `highest` that are to reach over `extent`.
    Scale(float extent, float highest) : scale(extent < SMALLEST ? 0 : extent / highest), factor(scale ? 1 / scale : 0) {}
};

// Numbers x[0 .. count) in whole vectors; the last one may repeat numbers of the one before.
template <class Body>
inline void each_vector(const float* x, int count, const Body& body) {
    if (count < WIDTH) {
        float padded[WIDTH];
        for (int lane = 0; lane < WIDTH; ++lane) padded[lane] = x[std::min(lane, count - 1)];
        return body(load(padded));
    }
    for (int at = 0; at + WIDTH <= count; at += WIDTH) body(load(x + at));
    if (count % WIDTH) body(load(x + count - WIDTH));
}

// The largest |x|: NaN where a number is not finite, LARGEST at most.
float largest_size(const float* x, int count) {
    Ints most{};
    each_vector(x, count, [&](Vec v) {
        const Ints bits = (Ints)v & 0x7fffffff;
        most = bits > most ? bits : most;
    });
    const int32_t bits = largest(most);
    if (bits > 0x7f7fffff) return NOT_A_NUMBER;
    float size;
    std::memcpy(&size, &bits, sizeof size);
    return std::min(size, LARGEST);
}

inline Vec clip(Vec x, float low, float high) { return -larger(splat(-high), -larger(splat(low), x)); }

// The first `count` of WIDTH codes.
inline void put_bytes(void* to, Ints codes, int count) {
    if (count >= WIDTH) return store_bytes(static_cast<uint8_t*>(to), codes);
    uint8_t bytes[WIDTH];
    store_bytes(bytes, codes);
    std::memcpy(to, bytes, count);
}

struct WriteInt8 {
    static constexpr float HIGHEST = 127;
    static Ints codes(Vec x) { return whole(x); }
};

struct WriteFloat8 {
    static constexpr float HIGHEST = 448;
    static Ints codes(Vec x) {
        const Words sign = ((Words)x >> 24) & 0x80, bits = (Words)x & 0x7fffffff;
        const Words normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120u << 3);
        const Words subnormal = (Words)whole((Vec)bits * splat(512.0f));
        return (Ints)((bits < (121u << 23) ? subnormal : normal) | sign);
    }
};

template <class Format>
void write_scaled(const float* x, int width, char* codes, float* scales) {
    const Scale made(largest_size(x, width), Format::HIGHEST);
    scales[0] = made.scale;
    if (!(made.factor > 0)) {
        std::memset(codes, 0, width);
        return;
    }
    for (int at = 0; at < width; at += WIDTH) {  // x is padded to whole vectors
        const Vec steps = clip(load(x + at) * splat(made.factor), -Format::HIGHEST, Format::HIGHEST);
        put_bytes(codes + at, Format::codes(steps), width - at);
    }
}

void write_group(const float* x, int count, uint8_t* steps, float* scale, float* least) {
    if (!(largest_size(x, count) <= LARGEST)) {
        *scale = *least = NOT_A_NUMBER;
        std::memset(steps, 0, count);
        return;
    }
    Vec high = splat(-LARGEST), minus_low = splat(-LARGEST);
    each_vector(x, count, [&](Vec v) { high = larger(high, v), minus_low = larger(minus_low, -v); });
    *least = -std::min(largest(minus_low), LARGEST);
    const Scale made(std::min(largest(high), LARGEST) - *least, 15);
    *scale = made.scale;
    for (int at = 0; at < count; at += WIDTH) {
        const Vec inside = clip(load(x + at), -LARGEST, LARGEST) - splat(*least);
        put_bytes(steps + at, whole(clip(inside * splat(made.factor), 0, 15)), count - at);
    }
}

void write_int4(const float* x, int width, char* codes, float* scales) {
    uint8_t steps[MAX_HEAD_DIM + 1];
    steps[width] = 0;
    const int half = (width + 1) / 2, groups = (width + KV_GROUP - 1) / KV_GROUP;
    for (int group = 0; group < groups; ++group) {
        const int first = group * KV_GROUP;
        write_group(x + first, std::min(KV_GROUP, width - first), steps + first, scales + group, scales + groups + group);
    }
    for (int i = 0; i < half; ++i) codes[i] = char(steps[i] | steps[half + i] << 4);
}

template <class S, class T>
void put_row(const S* from, T* to, int64_t width) {
    if constexpr (std::is_same_v<S, T>) {
        std::memcpy(to, from, width * sizeof(T));
    } else {
        int64_t at = 0;
        for (; at + WIDTH <= width; at += WIDTH) store(to + at, load(from + at));
        if (at < width) store_part(to + at, load_part(from + at, int(width - at)), int(width - at));
    }
}

// What Python passes; the fields stand in the same order in native.py.
struct Heads {
    const void* numbers;  // [tokens, heads, width] with strides in elements
    int64_t heads, stride, head_stride;

    template <class T>
    const T* of(int64_t token, int64_t head) const {
        return static_cast<const T*>(numbers) + token * stride + head * head_stride;
    }
};

// One side of a layer's pages: rows of codes and of scales.
struct Stored {
    char* codes;
    float* scales;
    int64_t format, row_bytes, num_scales, turned;
};

struct Call {
    int64_t tokens;
    Heads query, key, value;
    Stored keys, values;
    const float *cos, *sin;  // [tokens, half]
    const int64_t* slots;
    void* out;  // the query's shape, contiguous
    int64_t width, half, is_bfloat16;
    int64_t block_size, head_step, block_step;  // steps: rows from head to head and from block to block

    // The row of a token's first head.
    int64_t row(int64_t token) const {
        return slots[token] / block_size * block_step + slots[token] % block_size;
    }
};

template <class S>
void write_row(const S* from, int width, const Stored& stored, int64_t row) {
    char* codes = stored.codes + row * stored.row_bytes;
    float* scales = stored.scales + row * stored.num_scales;
    if (stored.format == KV_FLOAT32) return put_row(from, reinterpret_cast<float*>(codes), width);
    if (stored.format == KV_BFLOAT16) return put_row(from, reinterpret_cast<bfloat16*>(codes), width);
    alignas(64) float x[MAX_HEAD_DIM + WIDTH];
    put_row(from, x, width);
    store(x + width, Vec{});
    if (stored.turned) turn(x, width);
    if (stored.format == KV_FP8) write_scaled<WriteFloat8>(x, width, codes, scales);
    else if (stored.format == KV_INT8) write_scaled<WriteInt8>(x, width, codes, scales);
    else write_int4(x, width, codes, scales);
}

template <class T>
void rotate_write(const Call& call, int64_t t) {
    const Angles<T> angles(call.cos + t * call.half, call.sin + t * call.half, call.half);
    T* out = static_cast<T*>(call.out) + t * call.query.heads * call.width;
    for (int64_t head = 0; head < call.query.heads; ++head)
        turn_head(call.query.of<T>(t, head), angles, call.half, call.width, out + head * call.width);
    alignas(64) T key[MAX_HEAD_DIM];
    const int64_t row = call.row(t);
    for (int64_t head = 0; head < call.key.heads; ++head) {
        turn_head(call.key.of<T>(t, head), angles, call.half, call.width, key);
        write_row(key, int(call.width), call.keys, row + head * call.head_step);
        write_row(call.value.of<T>(t, head), int(call.width), call.values,
                  row + head * call.head_step);
    }
}

}  // namespace
}  // namespace batchgen

BATCHGEN_EXPORT void batchgen_rotate_write(const batchgen::Call* call) {
    using namespace batchgen;
    const int64_t numbers = (call->query.heads + 2 * call->key.heads) * call->width;
    const auto run = call->is_bfloat16 ? rotate_write<bfloat16> : rotate_write<float>;
    parallel_parts(call->tokens, 16384 / numbers + 1, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) run(*call, t);
    });
}
