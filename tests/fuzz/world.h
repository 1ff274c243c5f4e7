// One fuzzed call: its arguments as the C interface takes them, each tensor in a heap block of
// exactly its reach (so that the address sanitizer sees every byte outside), what was spoilt, and
// what must hold afterwards.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "sonicmoe/c_api.h"
#include "sonicmoe/types.h"

namespace sonicmoe::fuzz {

/// A forbidden action of a call.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::uint64_t bits() { return engine_(); }
  std::int64_t in(std::int64_t first, std::int64_t last) {
    return first + static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(last - first + 1));
  }
  bool percent(std::int64_t chance) { return in(0, 99) < chance; }
  template <class T>
  T pick(std::initializer_list<T> list) {
    return list.begin()[in(0, static_cast<std::int64_t>(list.size()) - 1)];
  }
  double unit() { return static_cast<double>(bits() >> 11) * 0x1p-52 - 1.0; }

 private:
  std::mt19937_64 engine_;
};

enum class Access {
  kRead,
  kParameter,  ///< read, and no two elements share memory
  kWritten,
};

/// A tensor argument. The tail is what a caller of a newer version would have there.
struct Arg {
  struct Padded {
    smoe_tensor tensor;
    unsigned char tail[32];
  };

  std::string name;
  Access access = Access::kRead;
  Padded c{};
  std::vector<std::int64_t> integers;  ///< of an index tensor, in row-major order
  bool is_null = false;
  bool is_placed = false;  ///< its memory holds its elements

  const smoe_tensor* pointer() const { return is_null ? nullptr : &c.tensor; }
  smoe_tensor* pointer() { return is_null ? nullptr : &c.tensor; }
  Tensor view() const;
};

/// Memory lent beside the tensors.
struct Lent {
  std::string name;
  std::int64_t needed = 0;
  std::int64_t bytes = 0;
  std::int64_t misaligned = 0;
  bool is_null = false;
  bool is_read = false;  ///< not written, as h and saved of backward
  std::byte* base = nullptr;
  std::byte* data = nullptr;
};

class World {
 public:
  explicit World(std::uint64_t seed) : random(seed) {}

  Random random;
  smoe_exec exec{};
  /// The dtype to which intermediate results are rounded, if it is coarser than an output's.
  DType rounded_to = DType::kF64;

  Arg& tensor(const std::string& name, Access access, std::int32_t dtype,
              std::vector<std::int64_t> shape);
  Arg& index(const std::string& name, std::int32_t dtype, std::vector<std::int64_t> shape,
             std::int64_t first, std::int64_t last);
  Lent& buffer(const std::string& name, std::int64_t needed);
  /// Fields that spoil() may change. A size is that of its struct.
  void field(const std::string& name, std::int64_t* value);
  void field(const std::string& name, std::int32_t* value);
  void field(const std::string& name, double* value);
  void size_field(const std::string& name, std::uint32_t* value);
  const smoe_exec* exec_pointer() const { return exec_is_null_ ? nullptr : &exec; }
  void begin_exec();

  /// Changes something in `percent` of 100 calls.
  void spoil(std::int64_t percent);
  bool spoilt() const { return !changes_.empty(); }
  /// The change that spoil() made, in words.
  std::string changes() const;
  /// The same text with every argument of the call.
  std::string description() const;
  /// Gives every tensor and buffer its memory, with the same values again if called again.
  void place();

  /// Runs a call, checks what must hold for every call, and returns whether it gave SMOE_OK. Does
  /// not run a call that claims more memory than it has: the library may use what is claimed.
  bool call(const std::function<smoe_status()>& run);
  /// A dense copy of an output, for the expected values.
  Tensor expected(const Arg& arg);
  /// The output against its expected() copy.
  void compare(const Arg& arg, const Tensor& want) const;
  /// Floats of a (rows, cols) tensor.
  static std::vector<std::vector<double>> rows(const Tensor& t);

 private:
  struct Block {
    std::unique_ptr<std::byte[], void (*)(std::byte*)> data{nullptr, nullptr};
    std::int64_t bytes = 0;
  };
  struct Field {
    std::string name;
    std::function<void()> change;
  };

  std::byte* allocate(std::int64_t bytes);
  void lay_out(Arg& arg);
  void place(Arg& arg);
  void fill(const Arg& arg);
  void spoil(Arg& arg);
  void spoil(Lent& lent);
  void alias();
  bool shares_memory() const;
  bool claims_memory_that_is_not_there() const;
  void require_untouched(const std::vector<std::vector<std::byte>>& before, bool refused) const;
  std::int64_t odd_count();
  std::int64_t odd_stride();
  std::int64_t beside(std::int64_t value);

  std::deque<Arg> args_;
  std::deque<Lent> buffers_;
  std::deque<Block> blocks_;
  std::vector<Field> fields_;
  std::vector<std::string> changes_;
  bool exec_is_null_ = false;
  bool aliases_ = false;
  std::uint64_t value_seed_ = 0;
};

/// The calls, by what they are about. Each builds its arguments, spoils them, calls, and compares.
void fuzz_queries(World& world);
void fuzz_layer(World& world);
void fuzz_gemm(World& world);
void fuzz_route(World& world);
void fuzz_round(World& world);
void fuzz_choice(World& world);
void fuzz_losses(World& world);
void fuzz_packed(World& world);

}  // namespace sonicmoe::fuzz
