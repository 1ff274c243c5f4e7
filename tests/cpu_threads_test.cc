// The team of threads, and that the layer's bits do not depend on how many there are.
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>
#if defined(__linux__)
#include <grp.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#endif

#include "cpu/backend.h"
#include "cpu/moe_layer.h"
#include "cpu/threads.h"
#include "verify/convert.h"

namespace sonicmoe::cpu {
namespace {

TEST(CpuTeam, RunsEveryTaskOnce) {
  for (const std::int32_t size : {1, 2, 5}) {
    Team team(size);
    for (const std::int64_t tasks : {0, 1, 2, 100}) {
      std::vector<std::atomic<int>> calls(static_cast<std::size_t>(tasks));
      team.run(tasks, [&](std::int64_t task, std::int32_t worker) {
        EXPECT_LT(worker, size);
        ++calls[static_cast<std::size_t>(task)];
      });
      for (const auto& count : calls) EXPECT_EQ(count, 1);
    }
  }
}

TEST(CpuTeam, GrowsWithItsPhases) {
  Team team(5);
  for (const std::int64_t tasks : {2, 1, 3, 40, 2}) {
    std::atomic<std::int64_t> sum = 0;
    team.run(tasks, [&](std::int64_t task, std::int32_t) { sum += task; });
    EXPECT_EQ(sum, tasks * (tasks - 1) / 2);
  }
}

TEST(CpuTeam, HasNoMoreWorkersThanTasks) {
  EXPECT_EQ(Team(7, 3).size(), 3);
  EXPECT_EQ(Team(2, 3).size(), 2);
  EXPECT_EQ(Team(7, 0).size(), 1);
}

TEST(CpuTeam, StartsNoThreadForLittleWork) {
  EXPECT_EQ(thread_count({.num_threads = 4}, 1000.0), 1);
  EXPECT_EQ(thread_count({.num_threads = 4}, 1e12), 4);
}

TEST(CpuTeam, StartsNoMoreThanFourThreadsPerCore) {
  const auto cores = static_cast<std::int32_t>(std::thread::hardware_concurrency());
  EXPECT_LE(thread_count({.num_threads = 100'000}, 1e15), 4 * cores);
}

/// A layer with one hot expert, its inputs random; everything it writes.
struct Layer {
  static constexpr std::int64_t kTokens = 700, kHidden = 40, kWidth = 72, kExperts = 5, kSlots = 2;
  Problem problem;
  std::vector<std::vector<std::uint8_t>> memory;

  Tensor tensor(std::vector<std::int64_t> shape, DType dtype, double scale) {
    std::int64_t count = 1;
    for (const std::int64_t n : shape) count *= n;
    auto& bytes = memory.emplace_back(static_cast<std::size_t>(count * dtype_bytes(dtype)), 0xff);
    std::normal_distribution<double> normal(0.0, scale);
    for (std::int64_t i = 0; scale > 0 && i < count; ++i) {
      oracle::store(bytes.data(), dtype, i, normal(engine));
    }
    return shape.size() == 3   ? tensor3(bytes.data(), dtype, shape[0], shape[1], shape[2])
           : shape.size() == 2 ? tensor2(bytes.data(), dtype, shape[0], shape[1])
                               : tensor1(bytes.data(), dtype, shape[0]);
  }
  Buffer buffer(std::int64_t bytes) {
    auto& storage = memory.emplace_back(static_cast<std::size_t>(bytes), 0xff);
    return {storage.data(), bytes};
  }

  std::mt19937_64 engine{3};
};

std::vector<std::vector<std::uint8_t>> outputs_with(DType dtype, std::int32_t threads) {
  Layer l;
  l.memory.reserve(64);
  l.problem = {.tokens = Layer::kTokens,
               .hidden = Layer::kHidden,
               .width = Layer::kWidth,
               .experts = Layer::kExperts,
               .top_k = Layer::kSlots};
  l.problem.dtype = dtype;
  const std::int64_t d = Layer::kHidden, n = Layer::kWidth, e = Layer::kExperts;
  std::vector<std::int64_t> ids;
  for (std::int64_t t = 0; t < Layer::kTokens; ++t) {
    ids.push_back(1);
    ids.push_back(t % 7 == 0 ? -1 : t % 3 + 2);
  }
  const Exec exec{.num_threads = threads};
  const auto weights = [&](double scale) {
    Weights w;
    w.gate = l.tensor({e, n, d}, dtype, scale);
    w.up = l.tensor({e, n, d}, dtype, scale);
    w.down = l.tensor({e, d, n}, dtype, scale);
    w.b_gate = l.tensor({e, n}, dtype, scale);
    w.b_up = l.tensor({e, n}, dtype, scale);
    w.b_down = l.tensor({e, d}, dtype, scale);
    return w;
  };
  const Sizes f = cpu::moe_sizes(l.problem, Pass::kForward, exec);
  const Sizes b = cpu::moe_sizes(l.problem, Pass::kBackward, exec);
  ForwardArgs fa;
  fa.x = l.tensor({Layer::kTokens, d}, dtype, 1.0);
  fa.routing.ids = tensor2(ids.data(), DType::kI64, Layer::kTokens, Layer::kSlots);
  fa.routing.weights = l.tensor({Layer::kTokens, Layer::kSlots}, DType::kF32, 1.0);
  fa.weights = weights(0.15);
  BackwardArgs ba;
  ba.dout = l.tensor({Layer::kTokens, d}, dtype, 1.0);
  const std::size_t inputs = l.memory.size();
  fa.out = l.tensor({Layer::kTokens, d}, dtype, 0.0);
  fa.h = l.buffer(f.h_bytes);
  ba.dx = l.tensor({Layer::kTokens, d}, dtype, 0.0);
  ba.dweights = l.tensor({Layer::kTokens, Layer::kSlots}, DType::kF32, 0.0);
  ba.grads = weights(0.0);
  const std::size_t outputs = l.memory.size();
  fa.saved = l.buffer(f.saved_bytes);
  fa.scratch = l.buffer(f.scratch_bytes);
  cpu::moe_forward(l.problem, fa, exec);
  ba.x = fa.x;
  ba.routing = fa.routing;
  ba.weights = fa.weights;
  ba.h = fa.h;
  ba.saved = fa.saved;
  ba.scratch = l.buffer(b.scratch_bytes);
  cpu::moe_backward(l.problem, ba, exec);
  return {l.memory.begin() + static_cast<std::ptrdiff_t>(inputs),
          l.memory.begin() + static_cast<std::ptrdiff_t>(outputs)};
}

TEST(CpuThreads, GiveTheSameBits) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF64}) {
    const auto alone = outputs_with(dtype, 1);
    for (const std::int32_t threads : {2, 3, 4}) {
      EXPECT_EQ(outputs_with(dtype, threads), alone) << dtype_name(dtype) << ", " << threads;
    }
  }
}

#if defined(__linux__)
std::int64_t threads_of_this_process() {
  std::int64_t count = 0;
  for ([[maybe_unused]] const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    ++count;
  }
  return count;
}

TEST(CpuTeam, StartsNoMoreThreadsThanTasks) {
  const std::int64_t before = threads_of_this_process();
  Team team(50);
  std::atomic<std::int64_t> most = 0;
  team.run(3, [&](std::int64_t, std::int32_t) { most = threads_of_this_process(); });
  EXPECT_LE(most, before + 2);
}

// Exit codes of the child below.
enum Child : int { kSameBits = 0, kOtherBits = 1, kNoLimit = 2 };

/// Gives up root, whom the limit does not bind, and forbids this user any further thread.
bool forbid_threads() {
  constexpr uid_t kNobody = 65534;
  if (geteuid() == 0 &&
      (setgroups(0, nullptr) != 0 || setgid(kNobody) != 0 || setuid(kNobody) != 0)) {
    return false;
  }
  const rlimit one{1, 1};
  if (setrlimit(RLIMIT_NPROC, &one) != 0) return false;
  pthread_t thread;
  const auto nothing = [](void*) -> void* { return nullptr; };
  if (pthread_create(&thread, nullptr, nothing, nullptr) != 0) return true;
  pthread_join(thread, nullptr);
  return false;
}

TEST(CpuThreads, ATrainingStepSurvivesALimitOnProcesses) {
  const auto alone = outputs_with(DType::kF32, 1);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    [&]() noexcept {  // an exception ends the child, not the test
      if (!forbid_threads()) _exit(kNoLimit);
      _exit(outputs_with(DType::kF32, 4) == alone ? kSameBits : kOtherBits);
    }();
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << "the step ended the process by signal " << WTERMSIG(status);
  if (WEXITSTATUS(status) == kNoLimit) GTEST_SKIP() << "this system does not limit threads";
  EXPECT_EQ(WEXITSTATUS(status), kSameBits);
}
#endif

}  // namespace
}  // namespace sonicmoe::cpu
