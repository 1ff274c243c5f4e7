#include "runtime/module.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "runtime/device.h"
#include "runtime/error.h"
#include "runtime/memory.h"

namespace sonicmoe::emulator {
namespace {

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
    s.leave_out();
    is_found = true;
  }
  if (!is_found) {
    throw std::runtime_error(function->name + " has no instruction at line " +
                             spot.substr(colon + 1));
  }
}

/// Puts another line in the place of one, by `change`, NAME:LINE:TEXT. Only a text with a kernel of
/// that name is changed.
void replace_line(const std::string& change, std::string* text) {
  const std::size_t line = change.find(':') + 1, instead = change.find(':', line) + 1;
  if (line == 0 || instead == 0) {
    throw std::runtime_error("SONICMOE_EMULATED_INSTEAD is '" + change +
                             "' but must be KERNEL:LINE:TEXT");
  }
  if (text->find(change.substr(0, line - 1)) == text->npos) return;
  std::size_t begin = 0;
  for (int left = std::atoi(change.c_str() + line) - 1; left > 0; --left) {
    begin = text->find('\n', begin) + 1;
    if (begin == 0) throw std::runtime_error("no line " + change.substr(line));
  }
  text->replace(begin, text->find('\n', begin) - begin, change.substr(instead));
}

/// The text with the changes of replace_line(), one in each line of `changes`.
std::string with_changes(std::string_view text, const std::string& changes) {
  std::string changed(text);
  std::istringstream lines(changes);
  for (std::string change; std::getline(lines, change);) replace_line(change, &changed);
  return changed;
}

/// The name of a kernel without the hash that nvcc adds to anonymous namespaces. The hash depends
/// on the folder of the build, so it differs if ccache gives an object that was built in another
/// one.
std::string without_hash(std::string name) {
  static constexpr std::string_view kBefore = "_GLOBAL__N__";
  static constexpr std::size_t kDigits = 8;
  for (auto at = name.find(kBefore); at != name.npos; at = name.find(kBefore, at)) {
    at += kBefore.size();
    if (name.size() < at + kDigits) break;
    name.replace(at, kDigits, kDigits, '0');
  }
  return name;
}

}  // namespace

void PtxText::place_variables() {
  for (const Variable& variable : module_.variables) {
    if (variable.space != "global" && variable.space != "const") continue;
    void* at = memory().allocate(variable.bytes, kEveryDevice, Extent::Kind::kVariable);
    std::memset(at, 0, variable.bytes);
    std::copy(variable.initial.begin(), variable.initial.end(), static_cast<std::uint8_t*>(at));
    variables_[variable.name] = reinterpret_cast<std::uint64_t>(at);
  }
}

Program PtxText::build(const std::string& kernel) {
  const std::lock_guard lock(mutex_);
  if (!is_parsed_) {
    const std::string& change = configuration().instead;
    if (!change.empty()) changed_ = with_changes(text_, change);
    module_ = parse_module(change.empty() ? text_ : changed_);
    place_variables();
    is_parsed_ = true;
  }
  const auto found = std::find_if(module_.kernels.begin(), module_.kernels.end(),
                                  [name = without_hash(kernel)](const KernelText& k) {
                                    return without_hash(std::string(k.name)) == name;
                                  });
  require(found != module_.kernels.end(), cudaErrorInvalidDeviceFunction);
  Function function = parse_kernel(module_, *found);
  remove_instruction(configuration().without, &function);
  return Builder(function, variables_, target_).build();
}

void PtxTexts::add(const char* begin, const char* end) {
  static constexpr std::string_view kEntry = ".entry ";
  const std::lock_guard lock(mutex_);
  while (begin < end) {
    const std::string_view text(begin);
    PtxText& added = *texts_.emplace_back(std::make_unique<PtxText>(text));
    for (auto at = text.find(kEntry); at != text.npos; at = text.find(kEntry, at)) {
      at += kEntry.size();
      const std::string kernel(text.substr(at, text.find_first_of("( \n", at) - at));
      by_kernel_[without_hash(kernel)].try_emplace(added.target(), &added);
    }
    begin += text.size() + 1;
  }
}

PtxText& PtxTexts::with(const std::string& kernel, int capability) {
  const std::lock_guard lock(mutex_);
  const auto found = by_kernel_.find(without_hash(kernel));
  require(found != by_kernel_.end(), cudaErrorInvalidDeviceFunction);
  PtxText* latest = nullptr;
  for (const auto& [target, text] : found->second) {
    if (target.runs_on(capability)) latest = text;
  }
  require(latest != nullptr, cudaErrorNoKernelImageForDevice);
  return *latest;
}

PtxTexts& ptx_texts() {
  static PtxTexts& all = *new PtxTexts;  // as kernels() below
  return all;
}

std::string Kernel::readable_name() const {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(
      abi::__cxa_demangle(name_.c_str(), nullptr, nullptr, &status), &std::free);
  return status == 0 ? text.get() : name_;
}

std::shared_ptr<const Program> Kernel::program() {
  const std::lock_guard lock(mutex_);
  if (program_ == nullptr) {
    PtxText& text = ptx_texts().with(name_, configuration().limits.capability);
    program_ = std::make_shared<Program>(text.build(name_));
  }
  return program_;
}

void Kernel::note_run() {
  if (configuration().log.empty()) return;
  std::call_once(noted_, [&] {
    std::ofstream(configuration().log, std::ios::app)
        << name_ + " " + program()->target.name() + "\n";
  });
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

void Kernels::remove_module(const void* module) {
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

void emulator_add_ptx(const char* begin, const char* end) {
  sonicmoe::emulator::ptx_texts().add(begin, end);
}
