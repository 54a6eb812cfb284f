// Paged attention over work items: tasks in parallel, then the merge of the queries with several partial results.
#include "cpu.h"

#include <algorithm>

#include "../native/export.h"
#include "../native/parallel.h"
#include "../native/scratch.h"

namespace batchgen {
namespace {

struct ForPartials;
struct ForShares;

inline Vec some(const float* p, int64_t count) { return count >= WIDTH ? load(p) : load_part(p, int(count)); }

// The shares that the partial results `rows` of a query have in the whole sum, for WIDTH heads from `head` on.
void weigh(const Call& call, const float* largest, const float* total, const int64_t* rows,
           int64_t count, int64_t head, float* shares) {
    const int64_t heads = call.num_heads - head;
    const auto at = [&](const float* values, int64_t i) { return some(values + rows[i] * call.num_heads + head, heads); };
    Vec most = at(largest, 0), whole{};
    for (int64_t i = 1; i < count; ++i) most = larger(at(largest, i), most);
    if (call.sinks) {
        const Vec sink = some(call.sinks + head, heads) * splat(LOG2_E);
        most = larger(sink, most), whole = exp2<6>(sink - most);
    }
    for (int64_t i = 0; i < count; ++i) {
        const Vec share = at(total, i) * exp2<6>(at(largest, i) - most);
        store(shares + i * WIDTH, share);
        whole += share;
    }
    for (int64_t i = 0; i < count; ++i) store(shares + i * WIDTH, load(shares + i * WIDTH) / whole);
}

// The result of one query and head: partial outputs weighed by their shares.
template <class Q>
void mix(const Q* outputs, const int64_t* rows, int64_t count, int64_t row_size, const float* shares, int64_t width, Q* to) {
    const auto sum = [&](int64_t at, auto&& read) {
        Vec out{};
        for (int64_t i = 0; i < count; ++i) out = fma(read(outputs + rows[i] * row_size + at), splat(shares[i * WIDTH]), out);
        return out;
    };
    int64_t at = 0;
    for (; at + WIDTH <= width; at += WIDTH) store(to + at, sum(at, [](const Q* from) { return load(from); }));
    const int rest = int(width - at);
    if (rest) store_part(to + at, sum(at, [&](const Q* from) { return load_part(from, rest); }), rest);
}

template <class Q>
void merge(const Plan& plan, const Call& call, const Partials<Q>& partials, int64_t index) {
    const int64_t first = plan.merge_offsets[index], count = plan.merge_offsets[index + 1] - first;
    const int64_t *rows = plan.merge_partials + first, width = call.head_dim, row_size = call.num_heads * width;
    float* shares = reinterpret_cast<float*>(room<ForShares>(count * WIDTH * sizeof(float)));
    Q* to = static_cast<Q*>(call.out) + plan.merged_queries[index] * row_size;
    for (int64_t head = 0; head < call.num_heads; ++head) {
        if (head % WIDTH == 0) weigh(call, partials.largest, partials.total, rows, count, head, shares);
        mix(partials.outputs + head * width, rows, count, row_size, shares + head % WIDTH, width, to + head * width);
    }
}

// The queries, turned as the keys are: [T, Q, D].
template <class Q>
void turn_queries(const Call& call, Q* out) {
    const int width = int(call.head_dim);
    parallel_parts(call.tokens, 16384 / (call.num_heads * width) + 1, [&](int64_t begin, int64_t end) {
        alignas(64) float x[MAX_HEAD_DIM + WIDTH];
        for (int64_t row = begin * call.num_heads; row < end * call.num_heads; ++row) {
            const Q* from = static_cast<const Q*>(call.query) + row / call.num_heads * call.query_stride +
                            row % call.num_heads * call.query_head_stride;
            ReadPlain<Q>::row(reinterpret_cast<const char*>(from), nullptr, width, x);
            turn(x, width);
            ReadPlain<float>::row(reinterpret_cast<const char*>(x), nullptr, width, out + row * width);
        }
    });
}

template <class Q>
void attend(const Plan& plan, const Call& call, char* memory) {
    const int64_t rows = plan.num_partials * call.num_heads;
    float* largest = reinterpret_cast<float*>(memory);
    const Partials<Q> partials{reinterpret_cast<Q*>(largest + 2 * rows), largest, largest + rows};
    const int group = int(call.num_heads / call.num_kv_heads);
    const auto target = [&](int64_t index) {
        const Task& task = plan.tasks[index];
        return Target<Q>{plan, call, task, partials, int(task.first_head), group};
    };
    const auto narrow = [&](const Target<Q>& one) { return one.task.num_queries * group <= NARROW_LANES; };
    parallel_ahead(plan.num_tasks, [&](int64_t index, int64_t following) {
        const Target<Q> now = target(index), after = target(std::min(following, plan.num_tasks - 1));
        if (narrow(now)) attend_narrow<Q>(now, following < plan.num_tasks && narrow(after) ? &after : nullptr);
        else attend_wide<Q>(now);
    });
    parallel_parts(plan.num_merged, 16, [&](int64_t begin, int64_t end) {
        for (int64_t index = begin; index < end; ++index) merge(plan, call, partials, index);
    });
}

template <class Q>
void attention(const Plan& plan, Call call) {
    const int64_t partials = plan.num_partials * call.num_heads * (call.head_dim * sizeof(Q) + 2 * sizeof(float));
    const int64_t queries = call.turned ? call.tokens * call.num_heads * call.head_dim * sizeof(Q) : 0;
    char* memory = room<ForPartials>(queries + partials);
    if (call.turned) {
        Q* turned = reinterpret_cast<Q*>(memory);
        turn_queries(call, turned);
        call.query = turned, call.query_stride = call.num_heads * call.head_dim, call.query_head_stride = call.head_dim;
    }
    attend<Q>(plan, call, memory + queries);
}

}  // namespace
}  // namespace batchgen

BATCHGEN_EXPORT void batchgen_attention(const batchgen::Call* call) {
    using namespace batchgen;
    if (call->query_bfloat16) attention<bfloat16>(*call->plan, *call);
    else attention<float>(*call->plan, *call);
}
