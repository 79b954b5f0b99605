#include "text/tool_schema.h"

#include <gtest/gtest.h>

#include "text/json_text.h"

namespace lily::text {
namespace {

uint8_t types(const char* schema, const char* root = "{}") {
  const auto root_json = parse_json(root).value();
  return schema_types(parse_json(schema).value(), root_json);
}

std::string typed(std::string_view value, int types) {
  std::string out;
  append_typed_value(value, static_cast<uint8_t>(types), out);
  return out;
}

TEST(ToolSchema, Types) {
  EXPECT_EQ(types(R"({"type": "integer"})"), kInteger);
  EXPECT_EQ(types(R"({"type": ["string", "null"]})"), kString | kNull);
  EXPECT_EQ(types(R"({"anyOf": [{"type": "integer"}, {"type": "array", "items": {}}]})"), kInteger | kArray);
  EXPECT_EQ(types(R"({"oneOf": [{"type": "object"}, {"type": "boolean"}]})"), kObject | kBoolean);
  EXPECT_EQ(types(R"({"allOf": [{"type": ["integer", "string"]}, {"type": "integer"}]})"), kInteger);
  EXPECT_EQ(types(R"({"enum": [1, "a", null]})"), kInteger | kString | kNull);
  EXPECT_EQ(types(R"({"const": 1.5})"), kNumber);
  EXPECT_EQ(types(R"({"properties": {}})"), kObject);
  EXPECT_EQ(types(R"({"items": {}})"), kArray);
  for (const char* untyped : {R"({"description": "x"})", "{}", "true", R"({"type": "odd"})", R"({"type": 5})",
                              R"({"anyOf": [{}]})"})
    EXPECT_EQ(types(untyped), kUntyped) << untyped;
}

TEST(ToolSchema, References) {
  const char* root =
      R"({"$defs": {"Item": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}, "A/b": {"type": "number"}, "c d": {"type": "null"}}})";
  EXPECT_EQ(types(R"({"$ref": "#/$defs/Item"})", root), kObject);
  EXPECT_EQ(types(R"({"$ref": "#/$defs/A~1b"})", root), kNumber);
  EXPECT_EQ(types(R"({"$ref": "#/$defs/c%20d"})", root), kNull);
  EXPECT_EQ(types(R"({"$ref": "#/$defs/Loop"})", root), kUntyped);
  EXPECT_EQ(types(R"({"$ref": "#/$defs/None"})", root), kUntyped);
  EXPECT_EQ(types(R"({"$ref": "https://example.com/x"})", root), kUntyped);
  EXPECT_EQ(types(R"({"$ref": "#x"})", root), kUntyped);
}

TEST(ToolSchema, AlternativesThatMultiplyEnd) {
  // Each level refers to the next twice: 2^30 paths.
  std::string root = R"({"$defs": {"d30": {"type": "integer"})";
  for (int i = 0; i < 30; ++i) {
    const std::string next = "{\"$ref\": \"#/$defs/d" + std::to_string(i + 1) + "\"}";
    root += ", \"d" + std::to_string(i) + "\": {\"anyOf\": [" + next + ", " + next + "]}";
  }
  EXPECT_EQ(types(R"({"$ref": "#/$defs/d0"})", (root + "}}").c_str()), kUntyped);
}

TEST(ToolSchema, AValueThatIsNestedTooDeepStaysText) {
  const auto nested = [](size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_EQ(typed(nested(kMaxValueDepth), kArray), nested(kMaxValueDepth));
  EXPECT_EQ(typed(nested(100'000), kArray), '"' + nested(100'000) + '"');
}

TEST(ToolSchema, DeclaredFunctions) {
  const auto json = parse_json(R"([
    {"type": "function", "function": {"name": "a", "parameters": {"type": "object", "properties": {
       "items": {"type": "array", "items": {"$ref": "#/$defs/Item"}}, "note": {"description": "free"}, "one": {"$ref": "#/$defs/Item"}},
       "$defs": {"Item": {"type": "object"}}}}},
    {"type": "function", "function": {"name": "b", "parameters": {"properties": {"x": {"type": "number"}}}}},
    {"type": "function", "function": {"name": "c"}},
    {"type": "function", "function": {"name": "d", "parameters": {"$ref": "#/$defs/P", "$defs": {"P": {"allOf": [{"properties": {"y": {"type": "null"}}}]}}}}},
    {"type": "function", "function": {}}, 5, {"name": "bare"}])")
                        .value();
  const ToolSet tools(json);
  EXPECT_FALSE(tools.empty());
  EXPECT_EQ(tools.find("a")->find("items")->second, kArray);
  EXPECT_EQ(tools.find("a")->find("one")->second, kObject);
  EXPECT_EQ(tools.find("a")->find("note")->second, kUntyped);
  EXPECT_EQ(tools.find("b")->find("x")->second, kNumber);
  EXPECT_TRUE(tools.find("c")->empty());
  EXPECT_EQ(tools.find("d")->find("y")->second, kNull);
  EXPECT_NE(tools.find("bare"), nullptr);
  EXPECT_EQ(tools.find("e"), nullptr);
  EXPECT_TRUE(ToolSet(nullptr).empty());
}

TEST(ToolSchema, ValuesOfUntypedParametersStayStrings) {
  EXPECT_EQ(typed("[1, 2]", kUntyped), R"("[1, 2]")");
  EXPECT_EQ(typed("{'a': 1}", kUntyped), R"("{'a': 1}")");
  EXPECT_EQ(typed("{'a': 1}", kObject), R"("{'a': 1}")");  // not JSON
}

TEST(ToolSchema, ANumberBeyondADoubleStaysText) {
  const std::string largest(308, '9'), larger(309, '9');
  EXPECT_EQ(typed(largest, kInteger), largest);
  EXPECT_EQ(typed("1e308", kNumber), "1e308");
  for (const std::string& text :
       {larger, "-" + larger, larger + ".5", std::string("1e999"), std::string("-1e999")})
    EXPECT_EQ(typed(text, kInteger | kNumber), '"' + text + '"');
  EXPECT_EQ(typed("[1e999]", kArray), "\"[1e999]\"");
}

TEST(ToolSchema, ConversionInTheOrderOfTheRule) {
  EXPECT_EQ(typed("12", kInteger | kString), "12");
  EXPECT_EQ(typed("1.5", kInteger), "\"1.5\"");
  EXPECT_EQ(typed("1.5", kNumber), "1.5");
  EXPECT_EQ(typed(" 1E+3 ", kNumber), "1E+3");
  for (const char* no_number : {"1.", ".5", "+1", "01", "1e", "0x10", "NaN", "-", "1 2", ""})
    EXPECT_EQ(typed(no_number, kNumber | kInteger), std::string("\"") + no_number + "\"");
  EXPECT_EQ(typed("True", kBoolean), "true");
  EXPECT_EQ(typed("FALSE", kBoolean), "false");
  EXPECT_EQ(typed("yes", kBoolean), "\"yes\"");
  EXPECT_EQ(typed("null", kNull | kString), "null");
  EXPECT_EQ(typed("null", kInteger), "\"null\"");
  EXPECT_EQ(typed("None", kNull), "\"None\"");
  EXPECT_EQ(typed(R"([{"id": 1}])", kArray), R"([{"id": 1}])");
  EXPECT_EQ(typed(R"([1])", kObject), "\"[1]\"");
  EXPECT_EQ(typed("{\"a\":\n 1.50}", kObject), "{\"a\":\n 1.50}");
  EXPECT_EQ(typed("{\"a\": 1", kObject), R"("{\"a\": 1")");
  EXPECT_EQ(typed("x\n\"y\"", kObject | kString), R"("x\n\"y\"")");
}

}  // namespace
}  // namespace lily::text
