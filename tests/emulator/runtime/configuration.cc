#include "runtime/configuration.h"

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace sonicmoe::emulator {
namespace {

std::uint64_t number_or(const char* name, std::uint64_t otherwise, std::uint64_t least,
                        std::uint64_t most) {
  const char* value = std::getenv(name);
  if (value == nullptr) return otherwise;
  const std::string_view text(value);
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size() || number < least || number > most) {
    std::fprintf(stderr, "emulator: %s is '%s' but must be a number from %llu to %llu\n", name,
                 value, static_cast<unsigned long long>(least),
                 static_cast<unsigned long long>(most));
    std::exit(EXIT_FAILURE);
  }
  return number;
}

}  // namespace

const Configuration& configuration() {
  static const Configuration read = [] {
    Configuration c;
    c.devices = static_cast<int>(number_or("SONICMOE_EMULATED_GPUS", c.devices, 0, kMostDevices));
    c.multiprocessors = static_cast<int>(
        number_or("SONICMOE_EMULATED_MULTIPROCESSORS", c.multiprocessors, 1, 1024));
    c.seed = number_or("SONICMOE_EMULATED_SEED", c.seed, 0, UINT64_MAX);
    c.patience_s =
        static_cast<int>(number_or("SONICMOE_EMULATED_PATIENCE", c.patience_s, 1, 86400));
    if (const char* spot = std::getenv("SONICMOE_EMULATED_WITHOUT")) c.without = spot;
    if (const char* log = std::getenv("SONICMOE_EMULATED_LOG")) c.log = log;
    return c;
  }();
  return read;
}

}  // namespace sonicmoe::emulator
