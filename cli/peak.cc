#include "peak.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "cpu/gemm_kernels.h"
#include "cpu/threads.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sonicmoe::cli {
namespace {

// Enough independent chains to fill two pipes of latency 4 to 6.
constexpr int kChains = 12;
constexpr std::int64_t kRounds = 200000;

/// Runs kRounds * kChains multiply-adds and returns something that depends on all of them.
using Loop = float (*)();
struct PeakLoop {
  Loop run;
  double flops;  ///< of one multiply-add instruction
};

float portable_loop() {
  float acc[kChains] = {};
  float a = 0.5f;
  for (std::int64_t r = 0; r < kRounds; ++r) {
    for (float& v : acc) v = v * a + 1.0f;
  }
  float sum = 0;
  for (const float v : acc) sum += v;
  return sum;
}

#if defined(__x86_64__)
// Hides a constant from the compiler, which would otherwise fold the chain of multiply-adds. The
// usual empty asm is not allowed outside of src/cuda/ptx.
template <class T>
T opaque(T value) {
  volatile T hidden = value;
  return hidden;
}

__attribute__((target("avx2,fma"))) float avx2_loop() {
  const __m256 a = _mm256_set1_ps(opaque(0.5f)), b = _mm256_set1_ps(opaque(1.0f));
  __m256 acc[kChains];
  for (__m256& v : acc) v = b;
  for (std::int64_t r = 0; r < kRounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) acc[i] = _mm256_fmadd_ps(acc[i], a, b);
  }
  for (int i = 1; i < kChains; ++i) acc[0] = _mm256_add_ps(acc[0], acc[i]);
  return _mm256_cvtss_f32(acc[0]);
}

__attribute__((target("avx2,fma"))) float avx2_loop_f64() {
  const __m256d a = _mm256_set1_pd(opaque(0.5)), b = _mm256_set1_pd(opaque(1.0));
  __m256d acc[kChains];
  for (__m256d& v : acc) v = b;
  for (std::int64_t r = 0; r < kRounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) acc[i] = _mm256_fmadd_pd(acc[i], a, b);
  }
  for (int i = 1; i < kChains; ++i) acc[0] = _mm256_add_pd(acc[0], acc[i]);
  return static_cast<float>(_mm256_cvtsd_f64(acc[0]));
}

__attribute__((target("avx512f"))) float avx512_loop() {
  const __m512 a = _mm512_set1_ps(opaque(0.5f)), b = _mm512_set1_ps(opaque(1.0f));
  __m512 acc[kChains];
  for (__m512& v : acc) v = b;
  for (std::int64_t r = 0; r < kRounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) acc[i] = _mm512_fmadd_ps(acc[i], a, b);
  }
  for (int i = 1; i < kChains; ++i) acc[0] = _mm512_add_ps(acc[0], acc[i]);
  return _mm512_cvtss_f32(acc[0]);
}

__attribute__((target("avx512f"))) float avx512_loop_f64() {
  const __m512d a = _mm512_set1_pd(opaque(0.5)), b = _mm512_set1_pd(opaque(1.0));
  __m512d acc[kChains];
  for (__m512d& v : acc) v = b;
  for (std::int64_t r = 0; r < kRounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) acc[i] = _mm512_fmadd_pd(acc[i], a, b);
  }
  for (int i = 1; i < kChains; ++i) acc[0] = _mm512_add_pd(acc[0], acc[i]);
  return static_cast<float>(_mm512_cvtsd_f64(acc[0]));
}

__attribute__((target("avx512f,avx512bf16"))) float avx512bf16_loop() {
  const __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(opaque(0.5f)), _mm512_set1_ps(0.25f));
  const __m512bh b = _mm512_cvtne2ps_pbh(_mm512_set1_ps(opaque(0.125f)), _mm512_set1_ps(0.5f));
  __m512 acc[kChains];
  for (__m512& v : acc) v = _mm512_setzero_ps();
  for (std::int64_t r = 0; r < kRounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) acc[i] = _mm512_dpbf16_ps(acc[i], a, b);
  }
  for (int i = 1; i < kChains; ++i) acc[0] = _mm512_add_ps(acc[0], acc[i]);
  return _mm512_cvtss_f32(acc[0]);
}
#endif

PeakLoop loop_for([[maybe_unused]] DType dtype) {
#if defined(__x86_64__)
  const cpu::Isa isa = cpu::best_isa();
  const bool f64 = dtype == DType::kF64;
  if (isa == cpu::Isa::kAvx512Bf16 && dtype == DType::kBF16) return {avx512bf16_loop, 64};
  if (isa >= cpu::Isa::kAvx512)
    return f64 ? PeakLoop{avx512_loop_f64, 16} : PeakLoop{avx512_loop, 32};
  if (isa == cpu::Isa::kAvx2) return f64 ? PeakLoop{avx2_loop_f64, 8} : PeakLoop{avx2_loop, 16};
#endif
  return {portable_loop, 2};
}

/// The shortest of five runs of work() on all threads at once.
template <class Work>
double best_seconds(cpu::Team& team, Work&& work) {
  double best = 1e30;
  for (int repeat = 0; repeat < 6; ++repeat) {
    const auto begin = std::chrono::steady_clock::now();
    team.run(team.size(), work);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (repeat > 0) best = std::min(best, took.count());  // run 0 starts threads and maps pages
  }
  return best;
}

// A thread has two arrays of 32 MiB, which are larger than its part of any cache.
constexpr std::int64_t kFloats = 8 << 20;

}  // namespace

struct CpuPeak::Arrays {
  explicit Arrays(std::size_t threads)
      : from(threads, std::vector<float>(kFloats, 1.0f)), to(from), results(threads) {}
  std::vector<std::vector<float>> from, to;
  std::vector<float> results;
};

CpuPeak::CpuPeak(DType dtype, const Exec& exec)
    : dtype_(dtype), threads_(cpu::thread_count(exec, 1e18)) {
  arrays_ = std::make_unique<Arrays>(static_cast<std::size_t>(threads_));
}

CpuPeak::~CpuPeak() = default;

void CpuPeak::sample() {
  cpu::Team team(threads_);
  const auto threads = static_cast<double>(threads_);
  const PeakLoop loop = loop_for(dtype_);
  const double compute = best_seconds(team, [&](std::int64_t task, std::int32_t) {
    arrays_->results[static_cast<std::size_t>(task)] = loop.run();
  });
  const double memory = best_seconds(team, [&](std::int64_t task, std::int32_t) {
    const float* a = arrays_->from[static_cast<std::size_t>(task)].data();
    float* b = arrays_->to[static_cast<std::size_t>(task)].data();
    for (std::int64_t i = 0; i < kFloats; ++i) b[i] = a[i] * 0.5f + b[i];
  });
  flops_.push_back(threads * static_cast<double>(kRounds) * kChains * loop.flops / compute);
  bytes_.push_back(threads * static_cast<double>(kFloats) * 3 * sizeof(float) / memory);
}

Machine CpuPeak::machine() const {
  Machine m;
  m.name = "cpu";
  m.flops_per_second = *std::max_element(flops_.begin(), flops_.end());
  m.bytes_per_second = *std::max_element(bytes_.begin(), bytes_.end());
  m.source = std::string("measured now: ") + cpu::isa_name(cpu::best_isa()) +
             " multiply-adds and streaming through memory on " + std::to_string(threads_) +
             (threads_ == 1 ? " thread" : " threads");
  if (flops_.size() > 1) {
    m.source += ", best of " + std::to_string(flops_.size()) + " samples between the runs";
  }
  return m;
}

double CpuPeak::steadiness() const {
  const auto [low, high] = std::minmax_element(flops_.begin(), flops_.end());
  return *low / *high;
}

Machine measured_cpu(DType dtype, const Exec& exec) {
  CpuPeak peak(dtype, exec);
  peak.sample();
  return peak.machine();
}

}  // namespace sonicmoe::cli
