// A team of threads that computes a step together, the price of work, and scratch memory.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <new>
#include <vector>

#include "vectors.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

extern thread_local int max_threads;  // of the calling thread: the number that torch is set to

constexpr size_t HUGE_PAGE = 2 << 20, HUGE_PAGE_MIN_BYTES = 4 << 20;

// Allocations before one that fails, for tests; negative: none does.
inline std::atomic<int64_t> allocations_left{-1};
inline bool fails_on_purpose() { return allocations_left.load() >= 0 && allocations_left.fetch_sub(1) == 0; }

// Zeroed memory that grows and never shrinks, 64-byte aligned; from HUGE_PAGE_MIN_BYTES on in the system's
// large pages. Its content is lost when it grows, and when that fails by std::bad_alloc.
class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch &) = delete;
    Scratch &operator=(const Scratch &) = delete;
    Scratch(Scratch &&other) noexcept : data(other.data), size(other.size) {
        other.data = nullptr, other.size = 0;
    }
    ~Scratch() { free(data); }

    template <class T> T *get(int64_t count) {
        size_t bytes = size_t(round_up(count * int64_t(sizeof(T)), 64));
        if (bytes > size) {
            free(data);
            const size_t page = bytes < HUGE_PAGE_MIN_BYTES ? 64 : HUGE_PAGE;
            size = round_up(int64_t(bytes + bytes / 4), int64_t(page));
            data = fails_on_purpose() ? nullptr : aligned_alloc(page, size);
            if (!data) {
                size = 0;
                throw std::bad_alloc();
            }
#if defined(__linux__)
            if (page == HUGE_PAGE) madvise(data, size, MADV_HUGEPAGE);
#endif
            memset(data, 0, size);
        }
        return static_cast<T *>(data);
    }

  private:
    void *data = nullptr;
    size_t size = 0;
};

// Scratch memory of this thread, one for each type; its content is lost with the next call.
template <class T> inline T *thread_scratch(int64_t count) {
    static thread_local Scratch scratch;
    return scratch.get<T>(count);
}

constexpr double NS_PER_FLOP = 1 / 40.0, NS_PER_BYTE = 1 / 10.0;  // of one thread, about
constexpr double MIN_STEP_NS = 60e3;   // for each thread of a team: waking a thread takes 10 to 50 us
constexpr double MIN_PHASE_NS = 1500;  // for each thread that takes part in a phase: a barrier takes 0.3 us
constexpr double PART_NS = 40e3;       // of a long phase: parts are claimed, a late thread takes fewer
constexpr int64_t MAX_PARTS = 16;      // of a phase, for each thread
constexpr int SPINS = 4000;            // of a waiting thread before it sleeps, about 50 us

// Nanoseconds of one thread: an operation is bound by its arithmetic or by what it reads.
inline double price(double flops, double bytes) {
    const double computing = flops * NS_PER_FLOP, reading = bytes * NS_PER_BYTE;
    return computing > reading ? computing : reading;
}

// How many threads pay for work of so many nanoseconds.
inline int num_threads_for(double ns) {
    const double worth = ns / MIN_STEP_NS;
    return worth < 2 ? 1 : worth < max_threads ? int(worth) : max_threads;
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    sched_yield();
#endif
}

// What the threads of a team share. Waiting threads spin briefly, then sleep: a thread that spins would keep
// one that has work from its processor.
class TeamState {
  public:
    std::atomic<uint64_t> ticket{0};  // round << 16 | threads of the round
    std::atomic<int> busy{0};         // threads of the round that are not through
    std::atomic<int64_t> claimed{0};  // of the present phase
    void (*call)(void *work, TeamState &state, int index, int size) = nullptr;
    void *work = nullptr;
    Scratch scratches[2];  // for what all threads read

    // Returns when all `size` threads have called it. Throws std::bad_alloc where one of them has failed.
    void barrier(int size) {
        const unsigned now = phase.load();
        if (has_failed.load()) throw std::bad_alloc();
        if (arrived.fetch_add(1) + 1 < size) {
            wait([&] { return phase.load() != now || has_failed.load(); });
            if (phase.load() == now) throw std::bad_alloc();
            return;
        }
        arrived.store(0), claimed.store(0);
        phase.store(now + 1);
        wake();
    }
    // One thread's work in a round; without memory the other threads stop at their next barrier.
    void take_part(int index, int size) {
        try {
            call(work, *this, index, size);
        } catch (const std::exception &) {
            has_failed.store(true);
        }
        busy.fetch_sub(1);
        wake();
    }
    // Returns when all threads are through. Throws std::bad_alloc where one of them has failed.
    void finish() {
        wait([&] { return busy.load() == 0; });
        if (!has_failed.load()) return;
        arrived.store(0), has_failed.store(false);
        throw std::bad_alloc();
    }
    template <class Condition> void wait(Condition &&condition) {
        for (int i = 0; i < SPINS; i++) {
            if (condition()) return;
            relax();
        }
        pthread_mutex_lock(&mutex);
        sleepers.fetch_add(1);
        while (!condition()) pthread_cond_wait(&changed, &mutex);
        sleepers.fetch_sub(1);
        pthread_mutex_unlock(&mutex);
    }
    // Wakes those whose condition may have become true.
    void wake() {
        if (!sleepers.load()) return;
        pthread_mutex_lock(&mutex);
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&mutex);
    }

  private:
    alignas(64) std::atomic<unsigned> phase{0};
    alignas(64) std::atomic<int> arrived{0};
    std::atomic<bool> has_failed{false};
    std::atomic<int> sleepers{0};
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
};

// A thread of a team, as the functions that it calls see it. All threads call the same functions with the same arguments; each computes its
// part, and all meet at a function's end. No result depends on the number of threads.
struct TeamThread {
    TeamState &state;
    const int index, size;

    void barrier() const {
        if (size > 1) return state.barrier(size);
        state.claimed.store(0, std::memory_order_relaxed);
    }
    // 0, 1, 2, ... to whichever thread asks next, until the next barrier.
    int64_t claim() const { return state.claimed.fetch_add(1, std::memory_order_relaxed); }

    // body(first, last): parts of [0, count) that together cost `ns`, one for each thread that it pays for, or
    // more of them. They begin at multiples of `grain`.
    template <class Body> void share(int64_t count, double ns, Body &&body, int64_t grain = 1) const {
        const double worth = ns / MIN_PHASE_NS;
        int64_t parts = worth < 1 ? 1 : worth < size ? int64_t(worth) : size;
        const bool is_claimed = parts == size && size > 1 && ns > 2 * size * PART_NS;
        if (is_claimed) parts = min(MAX_PARTS, int64_t(ns / PART_NS / size)) * size;
        const int64_t grains = (count + grain - 1) / grain;
        for (int64_t i = is_claimed ? claim() : index; i < parts; i = is_claimed ? claim() : parts) {
            const int64_t first = grains * i / parts * grain, last = min(grains * (i + 1) / parts * grain, count);
            if (first < last) body(first, last);
        }
    }
};

// Threads that wait for work, made when they are first needed; the calling thread is thread 0.
class Team {
  public:
    ~Team() {
        if (!state || owner != getpid()) return;  // those of another process are not here
        state->ticket.store(STOP);
        state->wake();
        for (pthread_t worker : workers) pthread_join(worker, nullptr);
        delete state;
    }

    // work(thread) in `size` threads, or in as many as the system gives. Returns when all are through. Throws
    // std::bad_alloc where one of them has found no memory.
    template <class Work> void run(int size, Work &&work) {
        if (!state || owner != getpid())  // or this is a fork, where the threads are missing
            workers.clear(), state = new TeamState, owner = getpid();
        state->claimed.store(0);
        while (int(workers.size()) + 1 < size && add_worker()) {}
        size = min(size, int(workers.size()) + 1);
        state->call = [](void *work, TeamState &state, int index, int size) {
            (*(std::remove_reference_t<Work> *)work)(TeamThread{state, index, size});
        };
        state->work = (void *)&work, state->busy.store(size);
        if (size > 1) {
            state->ticket.store(((state->ticket.load() >> 16) + 1) << 16 | uint64_t(size));
            state->wake();
        }
        state->take_part(0, size);
        state->finish();
    }

  private:
    static constexpr uint64_t STOP = ~uint64_t(0);
    struct WorkerArgs {
        TeamState &state;
        int index;
        uint64_t seen;
    };
    TeamState *state = nullptr;
    std::vector<pthread_t> workers;
    pid_t owner = 0;

    bool add_worker() {
        workers.reserve(workers.size() + 1);
        WorkerArgs *args = new WorkerArgs{*state, int(workers.size()) + 1, state->ticket.load()};
        pthread_t worker;
        if (pthread_create(&worker, nullptr, attend, args)) {
            delete args;
            return false;
        }
        workers.push_back(worker);
        return true;
    }
    static void *attend(void *args) {
        TeamState &state = ((WorkerArgs *)args)->state;
        const int index = ((WorkerArgs *)args)->index;
        uint64_t seen = ((WorkerArgs *)args)->seen;
        delete (WorkerArgs *)args;
        while (true) {
            state.wait([&] { return state.ticket.load() != seen; });
            seen = state.ticket.load();
            if (seen == STOP) return nullptr;
            const int size = int(seen & 0xffff);
            if (index < size) state.take_part(index, size);
        }
    }
};

// The calling thread's.
inline Team &this_team() {
    static thread_local Team team;
    return team;
}
