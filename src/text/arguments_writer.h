// Writes the arguments of one call as JSON while the model writes its parameters.
#pragma once

#include <functional>
#include <set>
#include <string>
#include <string_view>

#include "text/tool_schema.h"

namespace lily::text {

// The pieces appended to `out` join to one JSON object, keys in the model's order. Values whose schema is a
// plain string are written as they come, others when they end. Exactly one newline is taken off each end of a
// value.
class ArgumentsWriter {
 public:
  // Null: the function is not declared. Must outlive this.
  explicit ArgumentsWriter(const ToolSet::Parameters* parameters) : parameters_(parameters) {}

  bool declares(std::string_view name) const { return parameters_ != nullptr && parameters_->contains(name); }
  bool is_unused(std::string_view name) const { return !used_.contains(name); }

  // False if the parameter was there already: the first counts, and this value is not written.
  bool begin_value(std::string_view name, std::string& out);
  void append(std::string_view text, std::string& out);
  void end_value(std::string& out);
  // Ends the object.
  void close(std::string& out);

 private:
  void write(std::string_view text, std::string& out);

  const ToolSet::Parameters* parameters_;
  std::set<std::string, std::less<>> used_;
  uint8_t types_ = kUntyped;  // of the open value
  bool discarded_ = false;
  bool at_start_ = false;       // nothing of the value was read
  bool newline_held_ = false;   // it ends in a newline that may be the last
  std::string key_, buffered_;  // of a value that is written at its end
};

}  // namespace lily::text
