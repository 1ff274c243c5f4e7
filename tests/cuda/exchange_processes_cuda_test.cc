// One process for each rank, over memory that the processes share by CUDA IPC: on two GPUs if the
// machine has two, else on one. The test starts itself again for each rank.
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <thread>

#include "cuda/pretended_ranks.h"

extern char** environ;

namespace sonicmoe {
namespace {

using testing::Bits;
using testing::DeviceArray;
using testing::must;
using testing::PretendedRanks;
using testing::RankHandle;
using testing::RankLayer;
using testing::RankShape;
using testing::shape_with_own_records;

constexpr std::int32_t kRanks = 2;
constexpr std::int64_t kLimitMs = 5'000;
constexpr const char* kFolderVariable = "SONICMOE_TEST_FOLDER";
constexpr const char* kRankVariable = "SONICMOE_TEST_RANK";

ExchangeShape exchange_shape(const RankShape& s) {
  return {kRanks, s.tokens, s.tokens * s.top_k, s.hidden, DType::kBF16};
}
std::int64_t rows_of(const RankShape& s) { return kRanks * s.tokens * s.top_k; }

/// Files that the ranks leave for each other.
class Meeting {
 public:
  Meeting(std::filesystem::path folder, std::int32_t rank)
      : folder_(std::move(folder)), rank_(rank) {}

  std::filesystem::path path(const std::string& name, std::int32_t rank) const {
    return folder_ / (name + std::to_string(rank));
  }
  void write(const std::string& name, const void* data, std::size_t bytes) const {
    const std::filesystem::path part = path("part_", rank_);
    std::ofstream(part, std::ios::binary).write(static_cast<const char*>(data), bytes);
    std::filesystem::rename(part, path(name, rank_));
  }
  std::string read(const std::string& name, std::int32_t rank) const {
    for (int i = 0; !std::filesystem::exists(path(name, rank)); ++i) {
      if (i > 6'000) throw std::runtime_error("rank " + std::to_string(rank) + " has no " + name);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    std::ifstream file(path(name, rank), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void barrier(const std::string& name) const {
    write(name, "", 0);
    for (std::int32_t r = 0; r < kRanks; ++r) read(name, r);
  }

 private:
  std::filesystem::path folder_;
  std::int32_t rank_;
};

void step(RankLayer& layer) {
  layer.forward(ExchangePart::kAll);
  layer.backward(ExchangePart::kAll);
}

/// One rank: runs ten steps and writes their bits to a file. Then rank 1 dies after it has sent its
/// rows, and rank 0 writes to its file how its step ends.
void run_rank(const Meeting& meeting, std::int32_t rank) {
  int devices = 0;
  must(cudaGetDeviceCount(&devices));
  const int ordinal = rank % devices;
  must(cudaSetDevice(ordinal));
  cudaStream_t stream = nullptr;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const Exec exec{
      .backend = Backend::kCuda, .device = cuda::open_device(ordinal), .stream = stream};
  const RankShape shape = shape_with_own_records(kRanks);
  ExchangeOptions options;
  options.shape = exchange_shape(shape);
  options.rank = rank;
  options.buffer_bytes = exchange_bytes(options.shape, exec);
  options.time_limit_ms = kLimitMs;
  void* own = nullptr;
  must(cudaMalloc(&own, options.buffer_bytes));
  cudaIpcMemHandle_t handle;
  must(cudaIpcGetMemHandle(&handle, own));
  meeting.write("handle", &handle, sizeof(handle));
  void* addresses[kRanks];
  for (std::int32_t r = 0; r < kRanks; ++r) {
    addresses[r] = own;
    if (r == rank) continue;
    std::memcpy(&handle, meeting.read("handle", r).data(), sizeof(handle));
    must(cudaIpcOpenMemHandle(&addresses[r], handle, cudaIpcMemLazyEnablePeerAccess));
  }
  options.buffers = addresses;
  Exchange* exchange = exchange_open(options, exec);
  RankLayer layer({exchange, exec, ordinal, rank, kRanks}, shape, rows_of(shape));
  layer.route(1, static_cast<int>(shape.experts));
  must(cudaSetDevice(ordinal));
  meeting.barrier("open");
  layer.poison();
  must(cudaSetDevice(ordinal));
  for (int repeat = 0; repeat < 10; ++repeat) step(layer);
  must(cudaDeviceSynchronize());
  exchange_check(*exchange, exec);
  Bits bits;
  layer.append(bits);
  std::string all;
  for (const auto& one : bits) all.append(one.begin(), one.end());
  meeting.write("bits", all.data(), all.size());
  meeting.barrier("ten_steps");
  if (rank == 1) {
    layer.forward(ExchangePart::kBegin);
    must(cudaDeviceSynchronize());
    meeting.write("dies", "", 0);
    kill(getpid(), SIGKILL);
  }
  std::string sentence;
  try {
    layer.forward(ExchangePart::kAll);
    must(cudaDeviceSynchronize());
    exchange_check(*exchange, exec);
  } catch (const Error& e) {
    sentence = e.what();
  }
  meeting.write("sentence", sentence.data(), sentence.size());
  _exit(0);  // does not free the memory that the other process has shared
}

pid_t start_rank(const std::filesystem::path& folder, std::int32_t rank) {
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  const std::string filter = "--gtest_filter=ExchangeProcesses.*";
  const std::string where = std::string(kFolderVariable) + "=" + folder.string();
  const std::string which = std::string(kRankVariable) + "=" + std::to_string(rank);
  std::vector<char*> environment = {const_cast<char*>(where.c_str()),
                                    const_cast<char*>(which.c_str())};
  for (char** e = environ; *e != nullptr; ++e) {
    // With a shard of the tests the child would run none.
    if (std::string_view(*e).substr(0, 12) != "GTEST_TOTAL_") environment.push_back(*e);
  }
  environment.push_back(nullptr);
  char* arguments[] = {const_cast<char*>(program.c_str()), const_cast<char*>(filter.c_str()),
                       nullptr};
  pid_t child = 0;
  if (posix_spawn(&child, program.c_str(), nullptr, nullptr, arguments, environment.data()) != 0) {
    throw std::runtime_error("a rank could not be started");
  }
  return child;
}

/// The results of ranks in one process.
std::vector<std::string> expected_bits() {
  const RankShape shape = shape_with_own_records(kRanks);
  PretendedRanks ranks({.shape = exchange_shape(shape)});
  std::vector<std::unique_ptr<RankLayer>> layers;
  for (std::int32_t r = 0; r < kRanks; ++r) {
    layers.push_back(std::make_unique<RankLayer>(ranks.handle(r), shape, rows_of(shape)));
    layers[r]->route(1, static_cast<int>(shape.experts));
    layers[r]->poison();
  }
  for (const ExchangePart part : testing::kParts) {
    for (auto& layer : layers) layer->forward(part);
  }
  for (const ExchangePart part : testing::kParts) {
    for (auto& layer : layers) layer->backward(part);
  }
  ranks.wait();
  for (auto& layer : layers) EXPECT_GT(layer->own_records(Pass::kBackward), 0);
  std::vector<std::string> all;
  for (auto& layer : layers) {
    Bits bits;
    layer->append(bits);
    std::string& own = all.emplace_back();
    for (const auto& one : bits) own.append(one.begin(), one.end());
  }
  return all;
}

TEST(ExchangeProcesses, EqualRanksOfOneProcessAndSurviveADeath) {
  const char* folder = std::getenv(kFolderVariable);
  const char* rank = std::getenv(kRankVariable);
  if (folder != nullptr && rank != nullptr) {
    run_rank(Meeting(folder, std::atoi(rank)), std::atoi(rank));
    return;
  }
  std::string name = (std::filesystem::temp_directory_path() / "sonicmoe_ranksXXXXXX").string();
  ASSERT_NE(mkdtemp(name.data()), nullptr);
  std::vector<pid_t> children;
  for (std::int32_t r = 0; r < kRanks; ++r) children.push_back(start_rank(name, r));
  const Meeting meeting(name, kRanks);
  const std::vector<std::string> want = expected_bits();
  for (std::int32_t r = 0; r < kRanks; ++r) {
    EXPECT_EQ(meeting.read("bits", r) == want[r], true) << "rank " << r;
  }
  meeting.read("dies", 1);
  const auto start = std::chrono::steady_clock::now();
  const std::string sentence = meeting.read("sentence", 0);
  EXPECT_LT(std::chrono::steady_clock::now() - start,
            std::chrono::milliseconds(2 * kLimitMs + 5'000));
  EXPECT_NE(sentence.find("rank 1 did not send its partial sums"), std::string::npos) << sentence;
  std::cout << sentence << std::endl;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
  }
  std::filesystem::remove_all(name);
}

}  // namespace
}  // namespace sonicmoe
