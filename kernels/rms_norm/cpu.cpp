// RMS normalisation of rows; see the contract.
#include <algorithm>

#include "../native/export.h"
#include "../native/parallel.h"
#include "../native/sideways.h"
#include "../native/simd.h"

namespace batchgen {
namespace {

// As Python lays it out; the fields stand in the same order in native.py. Strides in elements.
struct Call {
    int64_t tokens;
    const void *x, *weight;
    void *residual, *out;  // [tokens, width]; out of a norm of parts of a token [tokens, inner, width]
    int64_t inner, width, stride, inner_stride, is_bfloat16;
    double epsilon;
};

constexpr int CHAINS = 4;  // of sums that do not wait for one another

// What a row is made of: itself.
template <class T>
struct Row {
    const T* x;

    Vec take(int64_t at) const { return load(x + at); }
    Vec take_part(int64_t at, int count) const { return load_part(x + at, count); }
};

// A residual that x is added to.
template <class T>
struct SumRow {
    T* x;
    const T* added;

    Vec take(int64_t at) const {
        const Vec sum = rounded<T>(load(x + at) + load(added + at));
        store(x + at, sum);
        return sum;
    }
    Vec take_part(int64_t at, int count) const {
        const Vec sum = rounded<T>(load_part(x + at, count) + load_part(added + at, count));
        store_part(x + at, sum, count);
        return sum;
    }
};

template <class T, class Source>
void norm_row(const Source& row, const T* weight, float epsilon, int64_t width, T* out) {
    Vec squares[CHAINS] = {};
    int64_t at = 0;
    for (; at + CHAINS * WIDTH <= width; at += CHAINS * WIDTH)
#pragma GCC unroll 4
        for (int chain = 0; chain < CHAINS; ++chain) {
            const Vec v = row.take(at + chain * WIDTH);
            squares[chain] = fma(v, v, squares[chain]);
        }
    double total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    for (; at < width; at += WIDTH) {
        const Vec v = row.take_part(at, int(std::min<int64_t>(width - at, WIDTH)));
        for (int lane = 0; lane < WIDTH; ++lane) total += double(v[lane]) * v[lane];
    }
    const Vec inverse = splat(float(1.0 / std::sqrt(total / double(width) + epsilon)));
    const T* x = row.x;
    for (at = 0; at + WIDTH <= width; at += WIDTH)
        store(out + at, load(weight + at) * rounded<T>(load(x + at) * inverse));
    const int rest = int(width - at);
    if (rest) store_part(out + at, load_part(weight + at, rest) * rounded<T>(load_part(x + at, rest) * inverse), rest);
}

template <class T>
void norm(const Call& call) {
    const T *x = static_cast<const T*>(call.x), *weight = static_cast<const T*>(call.weight);
    T* out = static_cast<T*>(call.out);
    parallel_parts(call.tokens, 16384 / (call.inner * call.width) + 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            for (int64_t j = 0; j < call.inner; ++j)
                norm_row(Row<T>{x + i * call.stride + j * call.inner_stride}, weight, float(call.epsilon), call.width,
                         out + (i * call.inner + j) * call.width);
    });
}

template <class T>
void add_norm(const Call& call) {
    const T *x = static_cast<const T*>(call.x), *weight = static_cast<const T*>(call.weight);
    T *residual = static_cast<T*>(call.residual), *out = static_cast<T*>(call.out);
    parallel_parts(call.tokens, 16384 / call.width + 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            norm_row(SumRow<T>{residual + i * call.width, x + i * call.stride}, weight, float(call.epsilon), call.width,
                     out + i * call.width);
    });
}

}  // namespace
}  // namespace batchgen

BATCHGEN_EXPORT void batchgen_rms_norm(const batchgen::Call* call) {
    using namespace batchgen;
    call->is_bfloat16 ? norm<bfloat16>(*call) : norm<float>(*call);
}

BATCHGEN_EXPORT void batchgen_add_rms_norm(const batchgen::Call* call) {
    using namespace batchgen;
    call->is_bfloat16 ? add_norm<bfloat16>(*call) : add_norm<float>(*call);
}
