// Arguments of operators. Each list is written once, as a macro. The macro makes the members of a
// struct, their order on torch's stack, and the schema that torch parses.
//
//   #define GEMM_ARGUMENTS(ARGUMENT) ARGUMENT(Array, a) ARGUMENT(MaybeArray, gather)
//   struct Gemm { SONICMOE_ARGUMENTS(GEMM_ARGUMENTS) };
//
// gives Gemm the members `a` and `gather`, fields(), and schema() "Tensor a, Tensor? gather".
// No argument is a string: torch's header would convert it to a std::string that is never freed.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <tuple>

#include "views.h"

namespace sonicmoe_torch {

template <class T>
constexpr const char* kSchemaType = nullptr;
template <>
inline constexpr const char* kSchemaType<Array> = "Tensor";
template <>
inline constexpr const char* kSchemaType<MaybeArray> = "Tensor?";
template <>
inline constexpr const char* kSchemaType<std::int64_t> = "int";
template <>
inline constexpr const char* kSchemaType<double> = "float";
template <>
inline constexpr const char* kSchemaType<bool> = "bool";

/// The parts that are not empty, joined by commas.
inline std::string listed(std::initializer_list<std::string> parts) {
  std::string list;
  for (const std::string& part : parts) {
    if (!part.empty()) list += (list.empty() ? "" : ", ") + part;
  }
  return list;
}

/// An argument before it is taken off torch's stack.
template <class T>
T unset() {
  return {};
}
/// Copies one undefined tensor: the default constructor allocates another one each time. It is
/// never freed, because torch may be gone when this library is unloaded.
template <>
inline Array unset<Array>() {
  static const Array& undefined = *new Array;
  return undefined;
}

#define SONICMOE_MEMBER(type, name) type name = unset<type>();
#define SONICMOE_FIELD(type, name) std::tie(name),
#define SONICMOE_SCHEMA(type, name) std::string(kSchemaType<type>) + " " #name,
#define SONICMOE_ARGUMENTS(LIST)                                                \
  LIST(SONICMOE_MEMBER)                                                         \
  auto fields() { return std::tuple_cat(LIST(SONICMOE_FIELD) std::tuple<>()); } \
  static std::string schema() { return listed({LIST(SONICMOE_SCHEMA) std::string()}); }

/// A struct that concatenates several lists of arguments.
template <class... Lists>
struct Joined : Lists... {
  auto fields() { return std::tuple_cat(Lists::fields()...); }
  static std::string schema() { return listed({Lists::schema()...}); }
};

/// Converts a number to 32 bits; refuses a number that does not fit.
inline std::int32_t int32(const char* name, std::int64_t number) {
  if (number < INT32_MIN || number > INT32_MAX) {
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(number) +
                                ", must fit into 32 bits");
  }
  return static_cast<std::int32_t>(number);
}

/// Converts a number to an enumerator; refuses numbers outside of 0 .. `last`.
template <class Enum>
Enum enumerator(const char* name, std::int64_t number, Enum last) {
  if (number < 0 || number > static_cast<std::int64_t>(last)) {
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(number) +
                                ", must be from 0 to " +
                                std::to_string(static_cast<std::int64_t>(last)));
  }
  return static_cast<Enum>(number);
}

}  // namespace sonicmoe_torch
