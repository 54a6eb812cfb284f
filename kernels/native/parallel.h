// Loops over the threads of runtime.cpp: as many as torch uses, its own as a rule. Nothing is linked: without torch's
// OpenMP runtime the loops run on the calling thread.
#pragma once

#include <atomic>
#include <cstdint>

namespace batchgen {

int num_threads();
void run_on_threads(void (*body)(void*), void* data, int threads);

// body(index, following) for every index below count; `following` is what the same thread does next, count or more if
// nothing. Whoever is free takes the next, so the dearest should come first.
template <class Body>
void parallel_ahead(int64_t count, const Body& body) {
    const int threads = int(count < num_threads() ? count : num_threads());
    if (threads <= 1) {
        for (int64_t index = 0; index < count; ++index) body(index, index + 1);
        return;
    }
    struct Job {
        const Body* body;
        int64_t count;
        std::atomic<int64_t> next{0};
    } job{&body, count};
    run_on_threads(
        [](void* data) {
            Job& job = *static_cast<Job*>(data);
            int64_t index = job.next.fetch_add(1, std::memory_order_relaxed);
            while (index < job.count) {
                const int64_t following = job.next.fetch_add(1, std::memory_order_relaxed);
                (*job.body)(index, following);
                index = following;
            }
        },
        &job, threads);
}

// body(index) for every index below count.
template <class Body>
void parallel(int64_t count, const Body& body) {
    parallel_ahead(count, [&](int64_t index, int64_t) { body(index); });
}

// body(begin, end) over equal parts of 0 .. count, none of them much smaller than `least`.
template <class Body>
void parallel_parts(int64_t count, int64_t least, const Body& body) {
    const int64_t most = count / (least > 1 ? least : 1);
    const int64_t parts = most < 1 ? 1 : (most < num_threads() ? most : num_threads());
    parallel(parts, [&](int64_t part) { body(count * part / parts, count * (part + 1) / parts); });
}

}  // namespace batchgen
