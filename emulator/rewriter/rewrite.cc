#include "emulator/rewriter/rewrite.h"

#include <fmt/format.h>

#include <map>
#include <stdexcept>

namespace lily::emulator {

namespace {

std::runtime_error error_at(const Token& t, const std::string& message) {
  return std::runtime_error(t.file + ":" + std::to_string(t.line) + ": error: " + message);
}

class Rewriter {
 public:
  explicit Rewriter(const std::vector<Token>& tokens) : t_(tokens) {}

  std::string run(const std::string& symbol, const std::string& file) {
    while (t_[i_].kind != Token::Kind::end) step();
    std::string out = "#include \"msl.h\"\nnamespace {\n" + out_ + "\n#ifndef MSL_CHECK\n";
    out += "const lily::emulator::CompiledKernel msl_kernels[] = {\n" + kernel_table_ + "{}};\n";
    out += "const lily::emulator::FunctionConstantSlot msl_constants[] = {\n" + constant_table_ +
           "{}};\n#endif\n}\n";
    out += "#ifndef MSL_CHECK\nextern const lily::emulator::CompiledFile " + symbol + ";\n";
    out += "const lily::emulator::CompiledFile " + symbol + " = {\"" + file + "\", msl_kernels, " +
           std::to_string(n_kernels_) + ", msl_constants, " + std::to_string(n_constants_) + "};\n#endif\n";
    return out;
  }

 private:
  bool in_function() const { return !scopes_.empty() && scopes_.back(); }

  void step() {
    const Token& t = t_[i_];
    if (t.kind == Token::Kind::directive) {
      copy();
    } else if (t.is("template") && t_[i_ + 1].is("[[")) {
      instantiation();
    } else if (t.is("[[")) {
      attribute();
    } else if (t.is("kernel") && !in_function()) {
      kernel();
    } else if (!(t.is("constant") && !in_function() && function_constant()) &&
               !(t.is("threadgroup") && in_function() && at_statement_ && threadgroup_variable())) {
      if (t.is("template")) template_pending_ = true;
      if (t.is("{")) scopes_.push_back(in_function() || opens_function(i_));
      if (t.is("}") && !scopes_.empty()) scopes_.pop_back();
      if (t.is(";") || t.is("}")) template_pending_ = false;
      at_statement_ = t.is(";") || t.is("{") || t.is("}");
      copy();
    }
  }

  void copy() {
    out_ += t_[i_].space + t_[i_].text;
    ++i_;
  }
  // Goes to `end` and keeps the line breaks on the way.
  void skip_to(size_t end) {
    for (; i_ < end; ++i_)
      for (char c : t_[i_].space)
        if (c == '\n') out_ += c;
  }

  // A brace after ')' opens a body; a member function may have an address space or const between.
  bool opens_function(size_t brace) const {
    size_t k = brace;
    while (k > 0) {
      const Token& t = t_[--k];
      if (!t.is("thread") && !t.is("const") && !t.is("device") && !t.is("threadgroup") && !t.is("constant"))
        return t.is(")");
    }
    return false;
  }

  void attribute() {
    const size_t end = matching(t_, i_) + 1;
    bool is_kernel = false;
    for (size_t k = i_; k < end; ++k) is_kernel |= t_[k].is("kernel");
    skip_to(end);
    if (is_kernel && !in_function()) note_kernel(i_);
  }

  void kernel() {
    note_kernel(i_ + 1);
    out_ += t_[i_].space;
    ++i_;
  }

  // Reads the parameters of the kernel whose declaration starts at `k`.
  void note_kernel(size_t k) {
    while (!t_[k].is("(")) {
      if (t_[k].is(";") || t_[k].kind == Token::Kind::end) throw error_at(t_[k], "kernel without parameters");
      ++k;
    }
    const std::string name = t_[k - 1].text;
    kernels_[name] = parameters(k, matching(t_, k));
    if (!template_pending_) add_kernel("\"" + name + "\"", name, kernels_[name]);
    template_pending_ = false;
  }

  void add_kernel(const std::string& host_name, const std::string& function, const std::string& arguments) {
    kernel_table_ += "MSL_KERNEL(" + host_name + ", (" + function + "), " + arguments + ")\n";
    ++n_kernels_;
  }

  // template [[host_name("x")]] [[kernel]] ... f<arguments> ... ;
  void instantiation() {
    size_t end = i_;
    while (!t_[end].is(";")) {
      if (t_[end].kind == Token::Kind::end) throw error_at(t_[i_], "instantiation without ';'");
      ++end;
    }
    std::string host_name;
    size_t k = i_ + 1;
    while (t_[k].is("[[")) {
      const size_t close = matching(t_, k);
      for (size_t a = k; a < close; ++a)
        if (t_[a].is("host_name"))
          for (size_t s = a + 2; t_[s].kind == Token::Kind::text; ++s) host_name += t_[s].text;
      k = close + 1;
    }
    // The last mention of a kernel before its parameter list, if it has one.
    size_t function = 0, function_end = 0;
    for (size_t a = k; a < end; ++a) {
      if (kernels_.count(t_[a].text) == 0) continue;
      function = a;
      function_end = t_[a + 1].is("<") ? matching(t_, a + 1) + 1 : a + 1;
      a = function_end - 1;
      if (t_[function_end].is("(")) break;
    }
    if (function != 0 && !host_name.empty())
      add_kernel(host_name, joined(t_, function, function_end), kernels_[t_[function].text]);
    // The checking compiler looks into a template only where it is instantiated.
    out_ += t_[i_].space + "MSL_INSTANTIATE(template " + joined(t_, k, end) + ";)";
    skip_to(end + 1);
    at_statement_ = true;
  }

  // constant T name [[function_constant(index)]];
  bool function_constant() {
    size_t k = i_;
    while (!t_[k].is(";") && !t_[k].is("=") && !t_[k].is("(") && !t_[k].is("{") && !t_[k].is("[[") &&
           !t_[k].is(")") && t_[k].kind != Token::Kind::end)
      ++k;
    if (!t_[k].is("[[") || !t_[k + 1].is("function_constant")) return false;
    const std::string arguments =
        fmt::format("({}, {}, {})", joined(t_, i_ + 1, k - 1), t_[k - 1].text, t_[k + 3].text);
    out_ += t_[i_].space + "MSL_FUNCTION_CONSTANT" + arguments;
    constant_table_ += "MSL_CONSTANT_SLOT" + arguments + "\n";
    ++n_constants_;
    while (!t_[k].is(";")) ++k;
    skip_to(k + 1);
    return at_statement_ = true;
  }

  // threadgroup T name[n], other[m]; pointers and references into threadgroup memory are left alone.
  bool threadgroup_variable() {
    size_t end = i_;
    int brackets = 0;
    for (; !t_[end].is(";"); ++end) {
      const Token& t = t_[end];
      if (t.kind == Token::Kind::end || t.is("(") || ((t.is("*") || t.is("&") || t.is("=")) && brackets == 0))
        return false;
      brackets += t.is("[") ? 1 : t.is("]") ? -1 : 0;
    }
    size_t name = i_ + 2;
    while (name < end && !(t_[name + 1].is("[") || t_[name + 1].is(";") || t_[name + 1].is(",")))
      name = t_[name].is("<") ? matching(t_, name) + 1 : name + 1;
    if (name >= end) return false;
    const std::string type = joined(t_, i_ + 1, name);
    out_ += t_[i_].space;
    for (size_t k = name; k < end;) {
      const std::string variable = t_[k].text;
      std::string dimensions;
      for (++k; k < end && !(t_[k].is(",") && brackets == 0); ++k) {
        brackets += t_[k].is("[") ? 1 : t_[k].is("]") ? -1 : 0;
        dimensions += t_[k].text;
      }
      out_ += fmt::format("MSL_THREADGROUP(({}), {}, ({}), {}) ", type, variable, dimensions, ++n_variables_);
      ++k;
    }
    skip_to(end + 1);
    return at_statement_ = true;
  }

  // The argument types of msl_kernel.h for the parameters between two parentheses.
  std::string parameters(size_t open, size_t close) const {
    std::string list;
    size_t first = open + 1;
    int depth = 0;
    for (size_t k = first; k <= close; ++k) {
      const Token& t = t_[k];
      if (k == close || (t.is(",") && depth == 0)) {
        if (k > first) list += (list.empty() ? "" : ", ") + parameter(first, k);
        first = k + 1;
      } else if (t.is("(") || t.is("[[") || t.is("<") || t.is("[")) {
        ++depth;
      } else if (t.is(")") || t.is("]]") || t.is(">") || t.is("]")) {
        --depth;
      }
    }
    return list;
  }

  std::string parameter(size_t first, size_t last) const {
    bool is_device = false, is_const = false, is_pointer = false, is_optional = false;
    std::string attribute, index;
    for (size_t k = first; k < last; ++k) {
      const Token& t = t_[k];
      if (t.is("device")) is_device = true;
      if (t.is("const") && !is_pointer) is_const = true;
      if (t.is("*") || t.is("&")) is_pointer = true;
      if (!t.is("[[")) continue;
      const size_t close = matching(t_, k);
      for (++k; k < close; ++k) {
        if (t_[k].is("function_constant")) {
          is_optional = true;
          k = matching(t_, k + 1);
        } else if (t_[k].kind == Token::Kind::word && attribute.empty()) {
          attribute = t_[k].text;
          if (t_[k + 1].is("(")) {
            const size_t end = matching(t_, k + 1);
            index = joined(t_, k + 2, end);
            k = end;
          }
        }
      }
    }
    if (attribute.empty())
      throw error_at(t_[first], "kernel parameter without an attribute: " + joined(t_, first, last));
    if (attribute == "buffer")
      return fmt::format("metal::entry::Buffer<{}, {}, {}>", index, is_device && !is_const && is_pointer,
                         is_optional);
    if (attribute == "threadgroup") return "metal::entry::ThreadgroupMemory<" + index + ">";
    return "metal::entry::Input_" + attribute;
  }

  const std::vector<Token>& t_;
  size_t i_ = 0;
  std::string out_, kernel_table_, constant_table_;
  std::map<std::string, std::string> kernels_;  // arguments by function name
  std::vector<bool> scopes_;                    // of each open brace: is it inside a function
  bool at_statement_ = true;
  bool template_pending_ = false;  // `template <...>` seen, its declaration not
  int n_kernels_ = 0, n_constants_ = 0, n_variables_ = 0;
};

}  // namespace

std::string rewrite(const std::vector<Token>& tokens, const std::string& symbol, const std::string& file) {
  return Rewriter(tokens).run(symbol, file);
}

}  // namespace lily::emulator
