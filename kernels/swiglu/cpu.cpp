// The gated activation; see the contract.
#include "../native/exponential.h"
#include "../native/export.h"
#include "../native/parallel.h"
#include "../native/simd.h"

namespace batchgen {
namespace {

// As Python lays it out; the fields stand in the same order in native.py.
struct Call {
    int64_t tokens;
    const void* x;  // [tokens, 2 * width] with a stride in elements
    void* out;      // [tokens, width]
    int64_t width, stride, is_bfloat16;
};

// e^-x to the precision that is left when it is rounded to T.
template <class T>
inline Vec exp_minus(Vec x);
template <>
inline Vec exp_minus<float>(Vec x) { return exp(-x); }
template <>
inline Vec exp_minus<bfloat16>(Vec x) {
    const Vec power = x * splat(-LOG2_E);
    return exp2<4>(power > splat(127.0f) ? splat(127.0f) : power);
}

template <class T>
inline Vec gated(Vec gate, Vec up) {
    return rounded<T>(gate / (splat(1.0f) + exp_minus<T>(gate))) * up;
}

template <class T>
void gate_row(const T* gate, const T* up, T* out, int64_t width) {
    int64_t at = 0;
    for (; at + WIDTH <= width; at += WIDTH) store(out + at, gated<T>(load(gate + at), load(up + at)));
    const int rest = int(width - at);
    if (rest) store_part(out + at, gated<T>(load_part(gate + at, rest), load_part(up + at, rest)), rest);
}

template <class T>
void swiglu(const Call& call) {
    const T* x = static_cast<const T*>(call.x);
    T* out = static_cast<T*>(call.out);
    parallel_parts(call.tokens, 8192 / call.width + 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const T* gate = x + row * call.stride;
            gate_row(gate, gate + call.width, out + row * call.width, call.width);
        }
    });
}

}  // namespace
}  // namespace batchgen

BATCHGEN_EXPORT void batchgen_swiglu(const batchgen::Call* call) {
    using namespace batchgen;
    call->is_bfloat16 ? swiglu<bfloat16>(*call) : swiglu<float>(*call);
}
