// The loops of route_simd.h, for the compiler to vectorise. The file of each instruction set
// includes this one in an unnamed namespace. The standard library is not used here: the linker
// would merge its templates of two instruction sets into one.

inline void load_row(const void* logits, DType dtype, std::int64_t n, float* x) {
  if (dtype == DType::kF32) {
    const auto* v = static_cast<const float*>(logits);
    for (std::int64_t i = 0; i < n; ++i) x[i] = key::clean(v[i], key::kLargestF32);
  } else if (dtype == DType::kBF16) {
    const auto* v = static_cast<const std::uint16_t*>(logits);
    for (std::int64_t i = 0; i < n; ++i) {
      x[i] = key::clean(key::float_of(std::uint32_t{v[i]} << 16), key::kLargestBF16);
    }
  } else {
    const auto* v = static_cast<const std::uint16_t*>(logits);
    for (std::int64_t i = 0; i < n; ++i) {
      const std::uint32_t magnitude = std::uint32_t{v[i]} & 0x7fffu;
      const std::uint32_t sign = (std::uint32_t{v[i]} & 0x8000u) << 16;
      const float subnormal = static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f;
      const std::uint32_t bias = magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u;
      const std::uint32_t normal =
          (magnitude << 13) + bias;  // the exponent of infinity and NaN stays all ones
      const std::uint32_t bits = magnitude < 0x400u ? key::bits_of(subnormal) : normal;
      x[i] = key::clean(key::float_of(bits | sign), key::kLargestF16);
    }
  }
}

inline void order_row(const float* __restrict v, std::int64_t n, std::uint32_t* __restrict keys) {
  for (std::int64_t i = 0; i < n; ++i) keys[i] = key::order_bits(v[i]);
}

inline void fold(const float* __restrict from, std::int64_t half, float* __restrict to) {
  for (std::int64_t i = 0; i < half; ++i) to[i] = from[2 * i] + from[2 * i + 1];
}

// The tree sum of core/selection_key.h. An odd last element moves to the next level unchanged: the
// tree adds zero to it.
inline float tree_sum_row(const float* v, std::int64_t n, float* tmp) {
  float* to = tmp;
  float* next = tmp + (n + 1) / 2;
  while (n > 1) {
    fold(v, n / 2, to);
    if (n % 2 != 0) to[n / 2] = v[n - 1];
    n = (n + 1) / 2;
    v = to;
    to = next;
    next = const_cast<float*>(v);
  }
  return n == 1 ? v[0] : 0.0f;
}

inline float softmax_row(const float* __restrict x, std::int64_t n, float* __restrict p, float* tmp,
                         float* top) {
  std::uint32_t best = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t k = key::order_bits(x[i]);
    best = k > best ? k : best;
  }
  if (best <= key::kUnavailable) {
    for (std::int64_t i = 0; i < n; ++i) p[i] = 0.0f;
    *top = key::minus_infinity();
    return 0.0f;
  }
  const float largest = key::from_order_bits(best);
  for (std::int64_t i = 0; i < n; ++i) p[i] = key::exp32(x[i] - largest);
  const float sum = tree_sum_row(p, n, tmp);
  const float inverse = 1.0f / sum;
  for (std::int64_t i = 0; i < n; ++i) p[i] *= inverse;
  *top = largest;
  return sum;
}

inline void sigmoid_row(const float* __restrict x, std::int64_t n, float* __restrict s) {
  for (std::int64_t i = 0; i < n; ++i) s[i] = key::sigmoid32(x[i]);
}

inline void sqrt_softplus_row(const float* __restrict x, std::int64_t n, float* __restrict s) {
  for (std::int64_t i = 0; i < n; ++i) s[i] = key::sqrt_softplus32(x[i]);
}

inline void sqrt_softplus_parts(const float* __restrict x, float top, std::int64_t n,
                                float* __restrict s, float* __restrict slope) {
  for (std::int64_t i = 0; i < n; ++i) {
    s[i] = key::sqrt_softplus_part32(x[i], top);
    slope[i] = key::sqrt_softplus_slope32(x[i]);
  }
}

template <class Key>
inline Key block_top(const Key* keys) {
  Key best = 0;
  for (std::int64_t i = 0; i < kTopBlock; ++i) best = keys[i] > best ? keys[i] : best;
  return best;
}

template <class Key>
inline std::int64_t first_equal(const Key* keys, Key wanted) {
  Key first = kTopBlock;
  for (std::int64_t i = 0; i < kTopBlock; ++i) {
    const Key here = keys[i] == wanted ? static_cast<Key>(i) : static_cast<Key>(kTopBlock);
    first = here < first ? here : first;
  }
  return static_cast<std::int64_t>(first);
}

// Keeps the maximum of each block. Each of the k largest keys is found by one pass over the maxima
// and one over the block that has the largest.
template <class Key>
inline void top_row(Key* keys, std::int64_t n, std::int64_t k, Key floor, Key* block_max,
                    std::int32_t* ids) {
  const std::int64_t blocks = (n + kTopBlock - 1) / kTopBlock;
  for (std::int64_t i = n; i < blocks * kTopBlock; ++i) keys[i] = 0;
  for (std::int64_t b = 0; b < blocks; ++b) block_max[b] = block_top(keys + b * kTopBlock);
  for (std::int64_t j = 0; j < k; ++j) {
    Key best = floor;
    std::int64_t block = -1;
    for (std::int64_t b = 0; b < blocks; ++b) {
      block = block_max[b] > best ? b : block;
      best = block_max[b] > best ? block_max[b] : best;
    }
    if (block < 0) {
      for (; j < k; ++j) ids[j] = -1;
      return;
    }
    Key* winner = keys + block * kTopBlock;
    const std::int64_t i = first_equal(winner, best);
    ids[j] = static_cast<std::int32_t>(block * kTopBlock + i);
    winner[i] = 0;
    block_max[block] = block_top(winner);
  }
}
