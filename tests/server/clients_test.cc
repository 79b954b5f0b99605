// Requests in the shape that coding agents and chat front-ends send, as their public documentation has it.
// Each file is {"api", "note", "body"}; all that the client relies on must arrive.
#include <filesystem>
#include <fstream>
#include <sstream>

#include "server/messages.h"
#include "server/openai_chat.h"
#include "server/responses.h"
#include "tests/server/wire.h"
#include "text/chat_template.h"
#include "text/normalise.h"

namespace lily::server {
namespace {

Json file(const std::string& name) {
  std::ifstream in("tests/server/clients/" + name + ".json");
  std::stringstream text;
  text << in.rdbuf();
  return parse_json(text.str());
}

Call parsed(const Json& request, ResponseStore& store) {
  const std::string api = request["api"];
  if (api == "chat") return parse_chat_completion(request["body"], tiny_model());
  if (api == "messages") return parse_message(request["body"], tiny_model());
  return parse_response(request["body"], tiny_model(), store);
}

struct Request {
  Call call;
  engine::ChatRequest chat;
  std::string prompt;
};

// Parsed, and rendered by the template as the engine does it.
Request of(const std::string& name) {
  ResponseStore store;
  Request out{parsed(file(name), store), {}, {}};
  out.chat = std::get<engine::ChatRequest>(out.call.request);
  const text::Conversation conversation = text::normalise(
      out.chat.messages, {.add_generation_prompt = true, .enable_thinking = out.chat.thinking.enabled});
  out.prompt = text::render(conversation.messages, out.chat.tools, conversation.options).text();
  return out;
}

TEST(Clients, EveryRecordedShapeIsAcceptedAndRendered) {
  int n = 0;
  for (const auto& entry : std::filesystem::directory_iterator("tests/server/clients")) {
    SCOPED_TRACE(entry.path().string());
    const Request request = of(entry.path().stem().string());
    EXPECT_THAT(request.prompt, testing::HasSubstr("<|im_start|>user\n"));
    EXPECT_TRUE(request.call.stream);
    ++n;
  }
  EXPECT_EQ(n, 6);
}

TEST(Clients, ClaudeCode) {
  const Request r = of("claude_code");
  EXPECT_EQ(r.chat.max_tokens, 32000);
  EXPECT_TRUE(r.chat.thinking.enabled);
  EXPECT_EQ(r.chat.tools.size(), 2u);
  EXPECT_EQ(r.prompt.find("billing"), std::string::npos);
  EXPECT_THAT(r.prompt, testing::HasSubstr("<function=Bash>\n<parameter=command>\nls src\n</parameter>"));
  EXPECT_THAT(r.prompt, testing::HasSubstr("<tool_response>\nmain.cc\n</tool_response>"));
}

TEST(Clients, Codex) {
  const Request r = of("codex");
  EXPECT_EQ(r.chat.cache_key, "0199a213-81c0-7800-8aa1-bbab2a035a53");
  ASSERT_EQ(r.chat.tools.size(), 4u);
  EXPECT_EQ(r.chat.tools[1]["function"]["name"], "apply_patch");
  EXPECT_EQ(r.chat.tools[3]["function"]["name"], "mcp__files__read_file");
  EXPECT_FALSE(r.chat.tool_choice.parallel);
  EXPECT_EQ(r.chat.thinking.budget, 8192);
  EXPECT_THAT(r.call.ignored, testing::Contains("tools of type web_search"));
  EXPECT_THAT(r.prompt, testing::HasSubstr("<function=shell_command>"));
  EXPECT_THAT(r.prompt, testing::HasSubstr("README.md"));
}

TEST(Clients, Opencode) {
  const Request r = of("opencode");
  EXPECT_EQ(r.chat.max_tokens, 32000);
  EXPECT_EQ(r.chat.tools.size(), 1u);
  // Two system messages become one turn.
  EXPECT_EQ(r.prompt.find("<|im_start|>system"), r.prompt.rfind("<|im_start|>system"));
  EXPECT_THAT(r.prompt, testing::HasSubstr("You are a coding agent.\n\nWorking directory: /src"));
}

TEST(Clients, Cline) {
  const Request r = of("cline");
  EXPECT_EQ(r.chat.sampling.temperature, 0.0f);
  EXPECT_TRUE(r.chat.tools.is_null());
  EXPECT_THAT(r.prompt, testing::HasSubstr("<task>\nFix the test.\n</task># environment"));
}

TEST(Clients, OpenWebUi) {
  const Request r = of("open_webui");
  EXPECT_THAT(r.prompt, testing::HasSubstr("What is the weather in Paris?"));
  EXPECT_EQ(r.chat.tools.size(), 1u);
}

TEST(Clients, Continue) {
  const Request r = of("continue");
  EXPECT_EQ(r.chat.max_tokens, 4096);
  EXPECT_TRUE(r.chat.tool_choice.parallel);
  EXPECT_THAT(r.prompt, testing::HasSubstr("<parameter=filepath>\nmain.py\n</parameter>"));
}

}  // namespace
}  // namespace lily::server
