// How many threads an operation gets, and memory that each keeps for itself.
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

extern thread_local int max_threads;  // as torch is told; of the thread that calls

constexpr double CREW_FLOPS = 4e6;  // work that pays for one more thread: about 50 us

inline int crew_for(double flops) {
    double wanted = flops / CREW_FLOPS;
    return wanted < 2 ? 1 : wanted < max_threads ? int(wanted) : max_threads;
}

inline int crew_member() {
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

inline int crew_size() {
#if defined(_OPENMP)
    return omp_get_num_threads();
#else
    return 1;
#endif
}

constexpr size_t HUGE_PAGE = 2 << 20, HUGE_FROM = 4 << 20;

// Grows and never shrinks; 64-byte aligned, large ones in the system's large pages; what was in it is lost when it grows.
class Room {
  public:
    Room() = default;
    Room(const Room &) = delete;
    Room &operator=(const Room &) = delete;
    Room(Room &&other) noexcept : data(other.data), size(other.size) {
        other.data = nullptr, other.size = 0;
    }
    ~Room() { free(data); }

    template <class T> T *of(int64_t count) {
        size_t bytes = size_t(round_up(count * int64_t(sizeof(T)), 64));
        if (bytes > size) {
            free(data);
            const size_t page = bytes < HUGE_FROM ? 64 : HUGE_PAGE;
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
