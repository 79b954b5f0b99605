#include "emulator/rewriter/lint.h"

#include <algorithm>
#include <set>

namespace lily::emulator {

namespace {

const std::set<std::string>& scalar_types() {
  static const std::set<std::string> types = [] {
    std::set<std::string> all = {"auto",     "void",        "int8_t",     "uint8_t",     "int16_t",
                                 "uint16_t", "int32_t",     "uint32_t",   "int64_t",     "uint64_t",
                                 "size_t",   "atomic_uint", "atomic_int", "atomic_bool", "atomic_float"};
    for (const char* scalar : {"float", "half", "bfloat", "int", "uint", "short", "ushort", "char", "uchar",
                               "long", "ulong", "bool"}) {
      all.insert(scalar);
      for (const char* n : {"2", "3", "4"}) {
        all.insert(std::string(scalar) + n);
        all.insert("packed_" + std::string(scalar) + n);
      }
    }
    return all;
  }();
  return types;
}

// Words that the checking compiler would take for OpenCL's.
const std::set<std::string> kReserved = {"local", "global", "generic", "uniform", "event_t", "pipe"};
const std::set<std::string> kNotInKernels = {"virtual", "throw",        "try",    "catch", "new",
                                             "delete",  "dynamic_cast", "typeid", "goto"};

bool is_address_space(const Token& t) {
  return t.is("device") || t.is("threadgroup") || t.is("thread") || t.is("constant");
}

// A decimal literal with a point or an exponent and no suffix is a float in Metal and a double on the host.
bool is_unsuffixed_float(const std::string& number) {
  if (number.compare(0, 2, "0x") == 0 || number.compare(0, 2, "0X") == 0) return false;
  if (number.find_first_of(".eE") == std::string::npos) return false;
  return number.back() != 'f' && number.back() != 'F';
}

}  // namespace

std::vector<std::string> lint(const std::vector<Token>& tokens) {
  std::vector<std::string> errors;
  std::set<std::string> types = scalar_types();
  const auto report = [&](const Token& t, const std::string& message) {
    errors.push_back(t.file + ":" + std::to_string(t.line) + ": error: " + message);
  };
  size_t start = 0;  // of the declaration that token i belongs to
  for (size_t i = 0; i < tokens.size(); ++i) {
    const Token& t = tokens[i];
    if (t.kind == Token::Kind::word && i > 0) {
      const Token& before = tokens[i - 1];
      if (before.is("struct") || before.is("typename") || before.is("class")) types.insert(t.text);
    }
    if (t.is("double")) report(t, "Metal has no double");
    if (t.kind == Token::Kind::number && is_unsuffixed_float(t.text))
      report(t, "literal " + t.text + " without the suffix f is a float in Metal and a double elsewhere");
    if (t.kind == Token::Kind::word && kReserved.count(t.text))
      report(t, "'" + t.text + "' is a keyword of the checking compiler; use another name");
    if (t.kind == Token::Kind::word && kNotInKernels.count(t.text) &&
        !(t.is("delete") && tokens[i - 1].is("=")))
      report(t, "'" + t.text + "' does not exist in Metal");
    if (t.kind == Token::Kind::directive || t.is(",") || t.is("(") || t.is(";") || t.is("{") || t.is("}") ||
        t.is("<") || t.is(")"))
      start = i + 1;
    if ((t.is("*") || t.is("&")) && i > start && types.count(tokens[i - 1].text) != 0 &&
        std::none_of(tokens.begin() + static_cast<std::ptrdiff_t>(start),
                     tokens.begin() + static_cast<std::ptrdiff_t>(i), is_address_space))
      report(t, "pointer or reference without an address space");
  }
  return errors;
}

}  // namespace lily::emulator
