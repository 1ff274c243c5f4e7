#include "runtime/module.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <utility>

#include "runtime/device.h"
#include "runtime/error.h"
#include "runtime/memory.h"

namespace sonicmoe::emulator {
namespace {

/// What nvcc's stubs register.
struct Wrapper {
  static constexpr std::uint32_t kMagic = 0x466243b1;
  std::uint32_t magic;
  std::uint32_t version;
  const std::byte* data;  ///< a FatHeader and entries
};

struct FatHeader {
  static constexpr std::uint32_t kMagic = 0xba55ed50;
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t header_bytes;
  std::uint64_t bytes;  ///< behind the header
};

struct FatEntry {
  static constexpr std::uint16_t kPtx = 1;
  std::uint16_t kind;
  std::uint16_t version;
  std::uint32_t header_bytes;
  std::uint64_t bytes;  ///< behind the header
};

template <class T>
T read(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

/// `spot` is NAME:LINE or empty. Throws if a kernel of that name has no instruction at the line.
void remove_instruction(const std::string& spot, Function* function) {
  if (spot.empty()) return;
  const std::size_t colon = spot.find(':');
  if (colon == std::string::npos) {
    throw std::runtime_error("SONICMOE_EMULATED_WITHOUT is '" + spot + "' but must be KERNEL:LINE");
  }
  if (function->name.find(spot.substr(0, colon)) == std::string::npos) return;
  const int line = std::atoi(spot.c_str() + colon + 1);
  bool is_found = false;
  for (Statement& s : function->statements) {
    if (s.line != line) continue;
    s.parts = {"discard"};  // which has no effect
    s.operands.clear();
    is_found = true;
  }
  if (!is_found) {
    throw std::runtime_error(function->name + " has no instruction at line " +
                             spot.substr(colon + 1));
  }
}

}  // namespace

std::string_view ptx_of(const void* wrapper) {
  const auto outer = read<Wrapper>(static_cast<const std::byte*>(wrapper));
  if (outer.magic != Wrapper::kMagic) throw std::runtime_error("a module has no fatbin");
  const auto header = read<FatHeader>(outer.data);
  if (header.magic != FatHeader::kMagic) throw std::runtime_error("a fatbin has no header");
  const std::byte* at = outer.data + header.header_bytes;
  const std::byte* end = at + header.bytes;
  while (at < end) {
    const auto entry = read<FatEntry>(at);
    at += entry.header_bytes;
    if (entry.kind == FatEntry::kPtx) {
      std::string_view text(reinterpret_cast<const char*>(at), entry.bytes);
      text = text.substr(0, text.find('\0'));
      if (text.find(".version") == std::string_view::npos) {
        throw std::runtime_error("the PTX of a module is compressed; nvcc needs -no-compress");
      }
      return text;
    }
    at += entry.bytes;
  }
  return {};
}

void LoadedModule::parse() {
  const std::string_view text = ptx_of(wrapper_);
  require(!text.empty(), cudaErrorNoKernelImageForDevice);
  module_ = parse_module(text);
  place_variables();
  is_parsed_ = true;
}

void LoadedModule::place_variables() {
  for (const Variable& variable : module_.variables) {
    if (variable.space != "global" && variable.space != "const") continue;
    void* at = memory().allocate(variable.bytes, kEveryDevice, Extent::Kind::kVariable);
    std::memset(at, 0, variable.bytes);
    std::copy(variable.initial.begin(), variable.initial.end(), static_cast<std::uint8_t*>(at));
    variables_[variable.name] = reinterpret_cast<std::uint64_t>(at);
  }
}

Program LoadedModule::build(const std::string& kernel) {
  const std::lock_guard lock(mutex_);
  if (!is_parsed_) parse();
  const auto found = std::find_if(module_.kernels.begin(), module_.kernels.end(),
                                  [&](const Function& f) { return f.name == kernel; });
  require(found != module_.kernels.end(), cudaErrorInvalidDeviceFunction);
  Function function = *found;
  remove_instruction(configuration().without, &function);
  return Builder(function, variables_).build();
}

std::string Kernel::readable_name() const {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(
      abi::__cxa_demangle(name_.c_str(), nullptr, nullptr, &status), &std::free);
  return status == 0 ? text.get() : name_;
}

std::shared_ptr<const Program> Kernel::program() {
  const std::lock_guard lock(mutex_);
  if (program_ == nullptr) program_ = std::make_shared<Program>(module_->build(name_));
  return program_;
}

void Kernel::note_run() {
  if (configuration().log.empty()) return;
  std::call_once(noted_,
                 [&] { std::ofstream(configuration().log, std::ios::app) << name_ + "\n"; });
}

int Kernel::most_threads() {
  const std::int64_t declared = program()->most_threads;
  return declared == 0 ? kMostThreads : static_cast<int>(declared);
}

Kernels& kernels() {
  static Kernels& all = *new Kernels;  // programs unregister modules while the process ends
  return all;
}

void Kernels::add(const void* host, std::shared_ptr<Kernel> kernel) {
  const std::lock_guard lock(mutex_);
  kernels_.try_emplace(kernel.get(), kernel);
  // Instances of a template have one host function in all modules, and the same code in each.
  kernels_.try_emplace(host, std::move(kernel));
}

void Kernels::remove_module(const LoadedModule* module) {
  const std::lock_guard lock(mutex_);
  std::erase_if(kernels_, [&](const auto& entry) { return entry.second->is_of(module); });
}

std::shared_ptr<Kernel> Kernels::find(const void* host_or_handle) const {
  const std::lock_guard lock(mutex_);
  const auto found = kernels_.find(host_or_handle);
  require(found != kernels_.end(), cudaErrorInvalidDeviceFunction);
  return found->second;
}

}  // namespace sonicmoe::emulator
