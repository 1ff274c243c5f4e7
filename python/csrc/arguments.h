// Arguments of operators, each list written once: a struct's members, the order in which they come
// off torch's stack and the schema that torch parses are made from it.
//
//   #define GEMM_ARGUMENTS(ARGUMENT) ARGUMENT(Array, a) ARGUMENT(MaybeArray, gather)
//   struct Gemm { SONICMOE_ARGUMENTS(GEMM_ARGUMENTS) };
//
// gives Gemm the members `a` and `gather`, fields(), and schema() "Tensor a, Tensor? gather".
// No argument is a string: torch's header makes a std::string of it that is never freed.
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

/// The parts that are not empty, with commas between.
inline std::string listed(std::initializer_list<std::string> parts) {
  std::string list;
  for (const std::string& part : parts) {
    if (!part.empty()) list += (list.empty() ? "" : ", ") + part;
  }
  return list;
}

#define SONICMOE_MEMBER(type, name) type name{};
#define SONICMOE_FIELD(type, name) std::tie(name),
#define SONICMOE_SCHEMA(type, name) std::string(kSchemaType<type>) + " " #name,
#define SONICMOE_ARGUMENTS(LIST)                                                \
  LIST(SONICMOE_MEMBER)                                                         \
  auto fields() { return std::tuple_cat(LIST(SONICMOE_FIELD) std::tuple<>()); } \
  static std::string schema() { return listed({LIST(SONICMOE_SCHEMA) std::string()}); }

/// Several lists of arguments, one after the other.
template <class... Lists>
struct Joined : Lists... {
  auto fields() { return std::tuple_cat(Lists::fields()...); }
  static std::string schema() { return listed({Lists::schema()...}); }
};

/// The enumerator of a number, which must be from 0 to that of `last`.
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
