// How many threads an operation gets, and memory that each keeps for itself.
#pragma once

#include <cstdlib>
#include <new>

#include "vectors.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

extern int max_threads;  // as torch is told

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

// Grows and never shrinks; 64-byte aligned; what was in it is lost when it grows.
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
            size = round_up(int64_t(bytes + bytes / 4), 64);
            data = aligned_alloc(64, size);
            if (!data) {
                size = 0;
                throw std::bad_alloc();
            }
            memset(data, 0, size);
        }
        return static_cast<T *>(data);
    }

  private:
    void *data = nullptr;
    size_t size = 0;
};
