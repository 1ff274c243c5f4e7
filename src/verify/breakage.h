// Negative controls: a sound implementation, the way to break it, and the fault that the harness
// must find.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "verify/blocks.h"
#include "verify/convert.h"
#include "verify/judge.h"

namespace sonicmoe::verify {

using Break = std::function<Implementation(const Implementation&)>;

struct Expectation {
  const char* case_name;
  Fault fault;
};

struct Control {
  const char* name;
  std::vector<Expectation> expectations;
  Break breakage;
};

// --- Helpers that change device memory.

// Downloads a view, calls f on the host copy and uploads it.
template <class F>
void edit(const Memory& memory, Tensor t, F f) {
  const std::int64_t bytes = extent(t) * dtype_bytes(t.dtype);
  std::vector<std::uint8_t> image(static_cast<std::size_t>(bytes));
  void* device = t.data;
  memory.download(image.data(), device, bytes);
  t.data = image.data();
  f(t);
  memory.upload(device, image.data(), bytes);
}

// Writes one byte at `offset` from `data`.
inline void scribble(const Memory& memory, void* data, std::int64_t offset) {
  const std::uint8_t value = 0;
  memory.upload(static_cast<std::uint8_t*>(data) + offset, &value, 1);
}

inline std::int64_t row_length(const Tensor& t) { return t.shape[t.rank - 1]; }
inline std::int64_t row_count(const Tensor& t) { return oracle::element_count(t) / row_length(t); }

inline void zero_rows(const Tensor& t, std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin * row_length(t); i < end * row_length(t); ++i) {
    oracle::store(t.data, t.dtype, oracle::element_offset(t, i), 0.0);
  }
}
inline void zero_middle_row(const Tensor& t) {
  zero_rows(t, row_count(t) / 2, row_count(t) / 2 + 1);
}
// Moves the rows [begin, end) by one, the last one to the front.
inline void rotate_rows(const Tensor& t, std::int64_t begin, std::int64_t end) {
  std::vector<double> values = oracle::read(t);
  const std::int64_t n = row_length(t);
  std::rotate(values.begin() + begin * n, values.begin() + (end - 1) * n, values.begin() + end * n);
  oracle::write(t, values);
}
inline void swap_middle_rows(const Tensor& t) {
  rotate_rows(t, row_count(t) / 2, row_count(t) / 2 + 2);
}
/// The controls of the router.
std::vector<Control> controls_of_the_router();

}  // namespace sonicmoe::verify
