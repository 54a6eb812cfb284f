// Paged attention over work items: tasks in parallel, then the merge of the queries with several partial results.
#include "cpu.h"

#include <algorithm>
#include <memory>

#include "../native/export.h"
#include "../native/parallel.h"

namespace batchgen {
namespace {

// Memory for the partial results of the calling thread's steps; it only grows.
void* workspace(int64_t bytes) {
    static thread_local std::unique_ptr<char[]> memory;
    static thread_local int64_t size = 0;
    if (size < bytes) memory.reset(new char[size = bytes]);
    return memory.get();
}

// The result of one query and head: partial outputs weighed by their share of the whole sum.
template <class Q>
void merge(const Plan& plan, const Call& call, const Partials<Q>& partials, int64_t index, int64_t head) {
    const int64_t first = plan.merge_offsets[index], count = plan.merge_offsets[index + 1] - first;
    const auto partial = [&](int64_t i) { return plan.merge_partials[first + i] * call.num_heads + head; };
    float largest = -INFINITY, total = 0;
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, partials.weights[2 * partial(i)]);
    const auto weight = [&](int64_t i) {
        const float* w = partials.weights + 2 * partial(i);
        return w[1] * std::exp2(w[0] - largest);
    };
    for (int64_t i = 0; i < count; ++i) total += weight(i);
    alignas(64) float out[MAX_HEAD_DIM + WIDTH] = {};
    const int64_t width = call.head_dim;
    for (int64_t i = 0; i < count; ++i) {
        const Q* from = partials.outputs + partial(i) * width;
        const Vec share = splat(weight(i) / total);
        int64_t at = 0;
        for (; at + WIDTH <= width; at += WIDTH) store(out + at, fma(load(from + at), share, load(out + at)));
        if (at < width) store(out + at, fma(load_part(from + at, int(width - at)), share, load(out + at)));
    }
    Q* to = static_cast<Q*>(call.out) + (plan.merged_queries[index] * call.num_heads + head) * width;
    int64_t at = 0;
    for (; at + WIDTH <= width; at += WIDTH) store(to + at, load(out + at));
    if (at < width) store_part(to + at, load(out + at), int(width - at));
}

template <class Q, class T>
void attention(const Plan& plan, const Call& call) {
    const int64_t rows = plan.num_partials * call.num_heads;
    char* memory = static_cast<char*>(workspace(rows * (call.head_dim * sizeof(Q) + 2 * sizeof(float))));
    const Partials<Q> partials{reinterpret_cast<Q*>(memory + rows * 2 * sizeof(float)), reinterpret_cast<float*>(memory)};
    const int group = int(call.num_heads / call.num_kv_heads);
    const auto target = [&](int64_t unit) {
        const Task& task = plan.tasks[unit / call.num_kv_heads];
        return Target<Q>{plan, call, task, partials, int(unit % call.num_kv_heads), group};
    };
    const auto narrow = [&](const Target<Q>& one) { return one.task.num_queries * group <= NARROW_LANES; };
    const int64_t units = plan.num_tasks * call.num_kv_heads;
    parallel_ahead(units, [&](int64_t unit, int64_t following) {
        const Target<Q> now = target(unit), after = target(std::min(following, units - 1));
        if (narrow(now)) attend_narrow<Q, T>(now, following < units && narrow(after) ? &after : nullptr);
        else attend_wide<Q, T>(now);
    });
    parallel_parts(plan.num_merged, 16, [&](int64_t begin, int64_t end) {
        for (int64_t index = begin; index < end; ++index)
            for (int64_t head = 0; head < call.num_heads; ++head) merge(plan, call, partials, index, head);
    });
}

}  // namespace
}  // namespace batchgen

BATCHGEN_EXPORT void batchgen_attention(const batchgen::Plan* plan, const batchgen::Call* call) {
    using namespace batchgen;
    if (call->query_bfloat16) {
        if (call->pages_bfloat16) attention<bfloat16, bfloat16>(*plan, *call);
        else attention<bfloat16, float>(*plan, *call);
    } else {
        if (call->pages_bfloat16) attention<float, bfloat16>(*plan, *call);
        else attention<float, float>(*plan, *call);
    }
}
