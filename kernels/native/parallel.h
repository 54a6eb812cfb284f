// Loops over threads, as many as torch uses: torch's, or those of runtime.cpp while other work keeps torch's. A loop must
// not count on all of them to come. Nothing is linked: without torch's OpenMP runtime the calling thread does it all.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace batchgen {

constexpr int PATIENCE = 4096;  // looks at what others still do before the processor is left to them

int num_threads();
void run_on_threads(void (*body)(void*), void* data, int threads);

// Parts of `count` for the threads there are, none of them much smaller than `least`; one at least.
inline int64_t num_parts(int64_t count, int64_t least) {
    const int64_t most = count / (least > 1 ? least : 1);
    return most < 1 ? 1 : (most < num_threads() ? most : num_threads());
}

// prepare(begin, end) over equal parts of 0 .. items, none much smaller than `least`. When all of them are done,
// body(index, following) for every index below count; `following` is what the same thread does next, count or more if
// that is not known yet. Whoever is free takes the next, so the dearest should come first; the last of them, one for
// each thread, are nobody's before he is free. The threads are woken once.
template <class Prepare, class Body>
void parallel_prepared(int64_t items, int64_t least, const Prepare& prepare, int64_t count, const Body& body) {
    const int threads = int(count < num_threads() ? count : num_threads());
    if (threads <= 1) {
        prepare(0, items);
        for (int64_t index = 0; index < count; ++index) body(index, index + 1);
        return;
    }
    struct Job {
        const Prepare* prepare;
        const Body* body;
        int64_t items, parts, count, threads;
        std::atomic<int64_t> next_part{0}, parts_done{0}, next{0};
    } job{&prepare, &body, items, num_parts(items, least), count, threads};
    run_on_threads(
        [](void* data) {
            Job& job = *static_cast<Job*>(data);
            for (int64_t part; (part = job.next_part.fetch_add(1, std::memory_order_relaxed)) < job.parts;) {
                (*job.prepare)(job.items * part / job.parts, job.items * (part + 1) / job.parts);
                job.parts_done.fetch_add(1, std::memory_order_release);
            }
            for (int turns = 0; job.parts_done.load(std::memory_order_acquire) < job.parts; ++turns)
                if (turns >= PATIENCE) std::this_thread::yield();
            const auto take = [&] { return job.next.fetch_add(1, std::memory_order_relaxed); };
            for (int64_t index = take(), following; index < job.count; index = following < job.count ? following : take()) {
                const bool many = job.next.load(std::memory_order_relaxed) + job.threads <= job.count;
                following = many ? take() : job.count;
                (*job.body)(index, following);
            }
        },
        &job, threads);
}

// The same with nothing to prepare.
template <class Body>
void parallel_ahead(int64_t count, const Body& body) {
    parallel_prepared(0, 1, [](int64_t, int64_t) {}, count, body);
}

// body(index) for every index below count.
template <class Body>
void parallel(int64_t count, const Body& body) {
    parallel_ahead(count, [&](int64_t index, int64_t) { body(index); });
}

// body(begin, end) over equal parts of 0 .. count, none of them much smaller than `least`.
template <class Body>
void parallel_parts(int64_t count, int64_t least, const Body& body) {
    const int64_t parts = num_parts(count, least);
    parallel(parts, [&](int64_t part) { body(count * part / parts, count * (part + 1) / parts); });
}

}  // namespace batchgen
