// Converts strided host tensors of any dtype to doubles and back.
#pragma once

#include <cstdint>
#include <vector>

#include "sonicmoe/types.h"

namespace sonicmoe::oracle {

/// r(.): the value of `dtype` nearest to v (ties to even), as a double.
double round_to(DType dtype, double v);
/// r(.) of each value; Real is float, double, or long double with kF64.
template <class Real>
void round_all(DType dtype, std::vector<Real>& values);

std::int64_t element_count(const Tensor& t);

/// Offset, in elements, of element number `index` in row-major order.
std::int64_t element_offset(const Tensor& t, std::int64_t index);

/// Element `index` of the first axis: a tensor of one rank less, in the same memory.
Tensor slice(const Tensor& t, std::int64_t index);

/// One element of a buffer of `dtype`.
double load(const void* data, DType dtype, std::int64_t offset);
void store(void* data, DType dtype, std::int64_t offset, double value);

/// One element of an integer tensor; a double cannot hold ids beyond 2^53.
std::int64_t load_integer(const Tensor& t, std::int64_t index);

/// All elements in row-major order, whatever the strides.
std::vector<double> read(const Tensor& t);
/// The inverse of read(); rounds to the tensor's dtype.
void write(const Tensor& t, const std::vector<double>& values);

}  // namespace sonicmoe::oracle
