// `lily serve` as a person starts it.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/server/serve.h"

namespace lily::test {
namespace {

using Json = nlohmann::ordered_json;

TEST(Serve, AnAddressThatOtherMachinesReachIsWarnedOfWithoutAKey) {
  for (const char* key : {"", "secret"}) {
    Child child({"serve", "-m", "models/lily-tiny", "--host", "0.0.0.0", "--port", "0", "--parallel", "1"},
                {{"HOME", "/nonexistent"}, {"LILY_API_KEY", key}});
    for (int i = 0; i < 6000 && child.err().find("ready at") == std::string::npos; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    const std::string said = child.err();
    ASSERT_NE(said.find("ready at"), std::string::npos) << said;
    EXPECT_EQ(said.find("0.0.0.0 can be reached from other machines") != std::string::npos, *key == '\0')
        << said;
  }
}

TEST(Serve, TheCacheTellsItsBytes) {
  Serve server({});
  const Json before = Json::parse(server.ask("/cache", "").body);
  EXPECT_EQ(before["bytes"], Json::parse(R"({"kv": 0, "states": 0, "replay": 0, "disk": 0})"));
  EXPECT_EQ(server
                .ask("/v1/chat/completions",
                     R"({"messages": [{"role": "user", "content": "What does the word river mean?"}]})")
                .status,
            200);
  const Json after = Json::parse(server.ask("/cache", "").body);
  EXPECT_GT(after["entries"], 0);
  for (const char* what : {"kv", "states", "replay"}) EXPECT_GT(after["bytes"][what], 0) << what;
  // A block and a state each have their size.
  const auto used = [&](const char* name) {
    return after[name]["total"].get<int64_t>() - after[name]["free"].get<int64_t>();
  };
  EXPECT_EQ(after["bytes"]["kv"].get<int64_t>() % used("kv_blocks"), 0);
  EXPECT_EQ(after["bytes"]["states"].get<int64_t>() % used("state_slots"), 0);
}

TEST(Serve, ASchemaThatCannotBeHeldIsToldWithThePathThatTheRequestHas) {
  Serve server({});
  const Json schema = Json::parse(
      R"json({"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}})json");
  const Json messages = Json::parse(R"([{"role": "user", "content": "hi"}])");
  const auto asked = [&](const char* path, Json body) {
    body["max_tokens"] = 1;
    const HttpReply reply = server.ask(path, body.dump());
    EXPECT_EQ(reply.status, 400) << reply.body;
    return Json::parse(reply.body)["error"];
  };
  Json error = asked(
      "/v1/chat/completions",
      {{"messages", messages},
       {"tool_choice", "required"},
       {"tools",
        {{{"type", "function"}, {"function", {{"name", "f"}, {"strict", true}, {"parameters", schema}}}}}}});
  EXPECT_EQ(error["param"].get<std::string>().find("tools[0].function.parameters"), 0u) << error;
  // A tool that is passed over counts too.
  error = asked("/v1/messages", {{"messages", messages},
                                 {"tool_choice", {{"type", "any"}}},
                                 {"tools",
                                  {{{"type", "web_search_20250305"}, {"name", "web_search"}},
                                   {{"name", "f"}, {"strict", true}, {"input_schema", schema}}}}});
  EXPECT_EQ(error["message"].get<std::string>().find("tools[1].input_schema"), 0u) << error;
  error = asked("/v1/messages", {{"messages", messages}, {"tools", {{{"name", "a b"}}}}});
  EXPECT_EQ(error["message"].get<std::string>().find("tools[0].name"), 0u) << error;
  Json asks_response = {
      {"input", "hi"},
      {"tool_choice", "required"},
      {"tools", {{{"type", "function"}, {"name", "f"}, {"strict", true}, {"parameters", schema}}}}};
  asks_response["max_output_tokens"] = 1;
  error = Json::parse(server.ask("/v1/responses", asks_response.dump()).body)["error"];
  EXPECT_EQ(error["param"].get<std::string>().find("tools[0].parameters"), 0u) << error;
  asks_response["tools"] = {{{"type", "namespace"}, {"name", "files"}, {"tools", asks_response["tools"]}}};
  error = Json::parse(server.ask("/v1/responses", asks_response.dump()).body)["error"];
  EXPECT_EQ(error["param"].get<std::string>().find("tools[0].tools[0].parameters"), 0u) << error;
}

}  // namespace
}  // namespace lily::test
