// The number of threads of an operation, and scratch memory.
#pragma once

#include <cstdlib>
#include <new>

#include "vectors.h"

#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

extern thread_local int max_threads;  // of the calling thread: the number that torch is set to

constexpr double FLOPS_PER_THREAD = 4e6;  // one more thread pays from here on: about 50 us

inline int threads_for(double flops) {
    double wanted = flops / FLOPS_PER_THREAD;
    return wanted < 2 ? 1 : wanted < max_threads ? int(wanted) : max_threads;
}

inline int thread_index() {
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

inline int team_size() {
#if defined(_OPENMP)
    return omp_get_num_threads();
#else
    return 1;
#endif
}

constexpr size_t HUGE_PAGE = 2 << 20, HUGE_PAGE_MIN_BYTES = 4 << 20;

// Zeroed memory that grows and never shrinks, 64-byte aligned; from HUGE_PAGE_MIN_BYTES on in the system's
// large pages. Its content is lost when it grows.
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
            data = aligned_alloc(page, size);
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
