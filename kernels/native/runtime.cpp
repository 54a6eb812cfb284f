// What the process grants: the instruction sets of the processor, and threads.
//
// Loops run on the threads of torch's OpenMP runtime, given by address. There a loop ends when the last thread has come:
// where other work takes the cores, each of the thousands of loops of a step waits for a thread that the system has put
// aside. A caller that finds itself waiting uses threads of its own for a while, and of these only those that come.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#include "export.h"
#include "parallel.h"
#include "sources.h"

namespace batchgen {
namespace {

using Region = void (*)(void (*)(void*), void*, unsigned, unsigned);
using Count = int (*)();
using Clock = std::chrono::steady_clock;

constexpr auto AWAKE = std::chrono::microseconds(200);  // a thread of our own looks for the next loop, then it sleeps
constexpr int LOOKS = 32;                               // between two looks at the clock
constexpr int SEEN = 64;                                // loops after which it is asked how long they were waited for
constexpr auto MOST_WAITED = std::chrono::microseconds(300);  // for a loop; a core that is free comes within 50
constexpr auto APART = std::chrono::seconds(10);        // on threads of our own

Region region = nullptr;
Count most_threads = nullptr;

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

class Pool {
public:
    // Runs body on the calling thread and on those of threads - 1 others that come before it is done. A second caller
    // at the same time gets none of them.
    void run(void (*body)(void*), void* data, int threads) {
        std::unique_lock<std::mutex> alone(caller_, std::try_to_lock);
        if (!alone) return body(data);
        for (; started_ < threads - 1; ++started_) std::thread(&Pool::serve, this, started_).detach();
        body_ = body, data_ = data, wanted_ = threads - 1;
        ++turn_;  // odd: open
        if (sleeping_) wake();
        body(data);
        ++turn_;
        for (int looks = 0; inside_; ++looks) looks < 4096 ? pause() : std::this_thread::yield();
    }

private:
    void serve(int index) {
        for (uint64_t seen = 0;;) {
            const uint64_t turn = next(seen);
            ++inside_;
            if (turn_ == turn && index < wanted_) body_(data_);
            --inside_;
            seen = turn;
        }
    }

    // The open loop that comes after `seen`.
    uint64_t next(uint64_t seen) {
        const auto end = Clock::now() + AWAKE;
        do {
            for (int look = 0; look < LOOKS; ++look, pause())
                if (const uint64_t turn = turn_; fresh(turn, seen)) return turn;
        } while (Clock::now() < end);
        std::unique_lock<std::mutex> lock(sleep_);
        ++sleeping_;
        uint64_t turn;
        awake_.wait(lock, [&] { return fresh(turn = turn_, seen); });
        --sleeping_;
        return turn;
    }

    static bool fresh(uint64_t turn, uint64_t seen) { return turn % 2 && turn != seen; }

    void wake() {
        std::lock_guard<std::mutex> lock(sleep_);
        awake_.notify_all();
    }

    std::mutex caller_, sleep_;
    std::condition_variable awake_;
    std::atomic<uint64_t> turn_{0};  // whoever is inside while it is odd, and has seen it so, may use body_ and data_
    std::atomic<int> inside_{0}, sleeping_{0}, wanted_{0};
    int started_ = 0;
    void (*body_)(void*) = nullptr;
    void* data_ = nullptr;
};

// Never freed: its threads last as long as the process.
Pool* pool = new Pool;
bool forked = false;

// A forked child has none of the threads, neither ours nor torch's, which it would wait for in vain.
void leave_threads() {
    pool = new Pool;
    forked = true;
}

// What a calling thread has seen of the threads of torch.
class Caller {
public:
    void run(void (*body)(void*), void* data, int threads) {
        const auto start = Clock::now();
        if (forked || start < apart_until_) return pool->run(body, data, threads);
        Loop loop{body, data, std::this_thread::get_id(), start};
        region(share, &loop, unsigned(threads), 0);
        note(start, loop.own_end, Clock::now());
    }

private:
    struct Loop {
        void (*body)(void*);
        void* data;
        std::thread::id caller;
        Clock::time_point own_end;
    };

    static void share(void* data) {
        Loop& loop = *static_cast<Loop*>(data);
        loop.body(loop.data);
        if (std::this_thread::get_id() == loop.caller) loop.own_end = Clock::now();
    }

    void note(Clock::time_point start, Clock::time_point own_end, Clock::time_point end) {
        took_ += end - start, waited_ += end - own_end;
        if (++loops_ < SEEN) return;
        if (waited_ > SEEN * MOST_WAITED && 3 * waited_ > took_) apart_until_ = end + APART;
        loops_ = 0, took_ = waited_ = {};
    }

    Clock::time_point apart_until_{};
    Clock::duration took_{}, waited_{};
    int loops_ = 0;
};

}  // namespace

int num_threads() { return most_threads ? most_threads() : 1; }

void run_on_threads(void (*body)(void*), void* data, int threads) {
    static thread_local Caller caller;
    caller.run(body, data, threads);
}

}  // namespace batchgen

// The addresses of GOMP_parallel and omp_get_max_threads; without them everything runs on the calling thread.
BATCHGEN_EXPORT void batchgen_use_threads(void* parallel, void* max_threads) {
#if defined(__unix__) || defined(__APPLE__)
    static const int once = pthread_atfork(nullptr, nullptr, batchgen::leave_threads);
    (void)once;
#endif
    batchgen::region = reinterpret_cast<batchgen::Region>(parallel);
    batchgen::most_threads = reinterpret_cast<batchgen::Count>(max_threads);
}

// The digest of the sources that the library was built from, see sources.py.
BATCHGEN_EXPORT const char* batchgen_sources() { return BATCHGEN_SOURCES; }

namespace batchgen {

// A call put down, see tape.py: its structure begins with a number of rows, which is to be `rows` this time.
struct Entry {
    void (*function)(void* call);
    int64_t* call;
    const int64_t* rows;
};

}  // namespace batchgen

BATCHGEN_EXPORT void batchgen_play(const batchgen::Entry* entries, int64_t count) {
    for (const batchgen::Entry* entry = entries; entry < entries + count; ++entry) {
        *entry->call = *entry->rows;
        if (*entry->rows) entry->function(entry->call);
    }
}

BATCHGEN_EXPORT int batchgen_num_threads() { return batchgen::num_threads(); }

// How many parts of a loop with one for each thread are under way at once. Each waits for the others, a second at most.
BATCHGEN_EXPORT int batchgen_parts_at_once() {
    const int parts = batchgen::num_threads();
    std::atomic<int> inside{0}, most{0};
    batchgen::parallel_parts(parts, 1, [&](int64_t, int64_t) {
        const int now = ++inside;
        for (int seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {}
        const auto end = batchgen::Clock::now() + std::chrono::seconds(1);
        while (most < parts && batchgen::Clock::now() < end) std::this_thread::yield();
        --inside;
    });
    return most;
}

// 2: AVX-512 with BF16 and VNNI, 1: AVX2 with FMA, 0: neither. Asks the processor and the operating system.
BATCHGEN_EXPORT int batchgen_instruction_set() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    if (wide) return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}
