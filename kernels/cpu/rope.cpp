#include "rope.h"

#include "kernels.h"

namespace deepinfer {

template <class T>
void rope(const T* x, const float* table, const int64_t* positions, bool inverse, int64_t rows, int64_t heads,
          int64_t size, int64_t rotated, T* y) {
  int64_t fixed = size - rotated;
  parallel_for(rows, (1 << 16) / (heads * size + 1) + 1, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      Rotation rotation(table + (positions[row] < 0 ? 0 : positions[row]) * rotated, rotated, inverse);
      for (int64_t vector = row * heads; vector < (row + 1) * heads; ++vector) {
        std::memcpy(y + vector * size, x + vector * size, size_t(fixed) * sizeof(T));
        rotation.apply(x + vector * size + fixed, y + vector * size + fixed);
      }
    }
  });
}

template void rope(const bf16*, const float*, const int64_t*, bool, int64_t, int64_t, int64_t, int64_t,
                   bf16*);
template void rope(const float*, const float*, const int64_t*, bool, int64_t, int64_t, int64_t, int64_t,
                   float*);

}  // namespace deepinfer
