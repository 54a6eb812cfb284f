// Rotary encoding of heads; see the contract.
#include "../native/export.h"
#include "../native/parallel.h"
#include "../native/simd.h"

namespace batchgen {
namespace {

// Products and sums are rounded to T one by one, as the contract wants it.
template <class T>
inline Vec turned(Vec a, Vec c, Vec b, Vec s) {
    return rounded<T>(a * c) + rounded<T>(b * s);
}

template <class T>
void turn_head(const T* x, const float* cos, const float* sin, int64_t half, int64_t width, T* out) {
    int64_t at = 0;
    for (; at + WIDTH <= half; at += WIDTH) {
        const Vec a = load(x + at), b = load(x + half + at);
        const Vec c = rounded<T>(load(cos + at)), s = rounded<T>(load(sin + at));
        store(out + at, turned<T>(a, c, b, -s));
        store(out + half + at, turned<T>(b, c, a, s));
    }
    if (const int rest = int(half - at)) {
        const Vec a = load_part(x + at, rest), b = load_part(x + half + at, rest);
        const Vec c = rounded<T>(load_part(cos + at, rest)), s = rounded<T>(load_part(sin + at, rest));
        store_part(out + at, turned<T>(a, c, b, -s), rest);
        store_part(out + half + at, turned<T>(b, c, a, s), rest);
    }
    std::memcpy(out + 2 * half, x + 2 * half, (width - 2 * half) * sizeof(T));
}

template <class T>
void turn(const T* x, const float* cos, const float* sin, T* out, int64_t tokens, int64_t heads, int64_t width,
          int64_t half, int64_t stride, int64_t head_stride) {
    parallel_parts(tokens, 16384 / (heads * width) + 1, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t)
            for (int64_t head = 0; head < heads; ++head)
                turn_head(x + t * stride + head * head_stride, cos + t * half, sin + t * half, half, width,
                          out + (t * heads + head) * width);
    });
}

}  // namespace
}  // namespace batchgen

// x [tokens, heads, width] with strides in elements; cos, sin [tokens, half] and out contiguous.
BATCHGEN_EXPORT void batchgen_rotary(const void* x, const float* cos, const float* sin, void* out, int64_t tokens,
                                     int64_t heads, int64_t width, int64_t half, int64_t stride, int64_t head_stride,
                                     int64_t is_bfloat16) {
    using namespace batchgen;
    if (is_bfloat16)
        turn(static_cast<const bfloat16*>(x), cos, sin, static_cast<bfloat16*>(out), tokens, heads, width, half, stride,
             head_stride);
    else
        turn(static_cast<const float*>(x), cos, sin, static_cast<float*>(out), tokens, heads, width, half, stride,
             head_stride);
}
