#include "text/normalise.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "text/json_text.h"

namespace lily::text {
namespace {

using testing::EndsWith;
using testing::HasSubstr;

RenderOptions generation(bool thinking = true) {
  RenderOptions options;
  options.add_generation_prompt = true;
  options.enable_thinking = thinking;
  return options;
}

RenderedPrompt prompt_for(const char* messages, RenderOptions options = generation()) {
  const auto conversation = normalise(parse_messages(parse_json(messages).value()), options);
  return render(conversation.messages, nullptr, conversation.options);
}

std::string error_for(const char* messages) {
  try {
    prompt_for(messages);
  } catch (const Error& error) {
    EXPECT_EQ(error.fault(), Fault::user);
    return error.what();
  }
  return "";
}

TEST(Normalise, SystemMessagesAtTheStartBecomeOne) {
  EXPECT_EQ(
      prompt_for(
          R"([{"role": "system", "content": "You are A."}, {"role": "developer", "content": "Rules: B."},
                          {"role": "user", "content": "hi"}])")
          .text(),
      "<|im_start|>system\nYou are A.\n\nRules: B.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
      "<|im_start|>assistant\n<think>\n");
}

TEST(Normalise, ALaterSystemMessageStaysInPlaceAndIsNoQuery) {
  const auto text = prompt_for(R"([{"role": "user", "content": "q"},
      {"role": "assistant", "content": "A", "reasoning_content": "alpha", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
      {"role": "tool", "content": "r"}, {"role": "system", "content": "be brief"}])")
                        .text();
  EXPECT_THAT(text, HasSubstr("<|im_start|>user\nSystem: be brief<|im_end|>\n"));
  EXPECT_THAT(text, HasSubstr("<think>\nalpha\n</think>"));  // a query would have removed it
}

TEST(Normalise, NoUserMessageIsNoError) {
  EXPECT_EQ(prompt_for(R"([{"role": "system", "content": "s"}])").text(),
            "<|im_start|>system\ns<|im_end|>\n<|im_start|>assistant\n<think>\n");
  EXPECT_EQ(
      prompt_for(
          R"([{"role": "system", "content": "s"}, {"role": "assistant", "content": "Hello, how can I help?"},
                          {"role": "tool", "content": "r"}])")
          .text(),
      "<|im_start|>system\ns<|im_end|>\n<|im_start|>assistant\nHello, how can I help?<|im_end|>\n"
      "<|im_start|>user\n<tool_response>\nr\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n");
}

TEST(Normalise, ArgumentsGivenAsStrings) {
  const auto call = [](const std::string& arguments) {
    return prompt_for((R"([{"role": "user", "content": "q"}, {"role": "assistant", "content": null,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": )" +
                       arguments + R"(}}]},
        {"role": "tool", "content": "r"}])")
                          .c_str())
        .text();
  };
  const std::string as_object = call(R"({"a": 1})");
  EXPECT_THAT(as_object, HasSubstr("<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"));
  EXPECT_EQ(call(R"("{\"a\": 1}")"), as_object);
  EXPECT_THAT(call(R"("")"), HasSubstr("<function=f>\n</function>"));
  EXPECT_THAT(call("null"), HasSubstr("<function=f>\n</function>"));
  EXPECT_THAT(call(R"("not json")"), HasSubstr("<parameter=arguments>\nnot json\n</parameter>"));
  EXPECT_THAT(call(R"("[1]")"), HasSubstr("<parameter=arguments>\n[1]\n</parameter>"));
  EXPECT_THAT(call(R"("{\"n\": 123456789012345678901234567890}")"),
              HasSubstr("\n123456789012345678901234567890\n"));
  // Deeper than anybody could use, and than those who read it could bear.
  const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
  EXPECT_THAT(call(R"("{\"a\": )" + deep + "}\""), HasSubstr("<parameter=arguments>\n{\"a\": [[["));
}

TEST(Normalise, ALastAssistantMessageIsContinued) {
  const auto prompt = prompt_for(
      R"([{"role": "user", "content": "Capital of France?"}, {"role": "assistant", "content": "The answer is"}])");
  EXPECT_THAT(prompt.text(), EndsWith("<|im_start|>assistant\n<think>\n\n</think>\n\nThe answer is"));
  EXPECT_FALSE(prompt.starts_in_thinking());
  EXPECT_TRUE(prompt.continues_text());

  const auto spaced = prompt_for(
      R"([{"role": "user", "content": "q"}, {"role": "assistant", "content": " The answer is "}])");
  EXPECT_THAT(spaced.text(),
              EndsWith("</think>\n\nThe answer is "));  // what is to be continued keeps its end

  const auto own = prompt_for(
      R"([{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>\nLet me"}])");
  EXPECT_THAT(own.text(), EndsWith("<|im_start|>assistant\n<think>\nLet me"));
  EXPECT_TRUE(own.starts_in_thinking());

  const auto closed = prompt_for(
      R"([{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSo"}])");
  EXPECT_THAT(closed.text(), EndsWith("<|im_start|>assistant\n<think>\nhm\n</think>\n\nSo"));
  EXPECT_FALSE(closed.starts_in_thinking());

  RenderOptions no_generation;
  EXPECT_THAT(prompt_for(R"([{"role": "user", "content": "q"}, {"role": "assistant", "content": "So"}])",
                         no_generation)
                  .text(),
              EndsWith("<think>\n\n</think>\n\nSo"));
  EXPECT_THAT(prompt_for(R"([{"role": "user", "content": "q"}])", no_generation).text(),
              EndsWith("q<|im_end|>\n"));
}

TEST(Normalise, ThinkingOffEndsWithAnEmptyBlock) {
  const auto prompt = prompt_for(R"([{"role": "user", "content": "q"}])", generation(false));
  EXPECT_THAT(prompt.text(), EndsWith("<|im_start|>assistant\n<think>\n\n</think>\n\n"));
  EXPECT_FALSE(prompt.starts_in_thinking());
  EXPECT_FALSE(prompt.continues_text());
}

TEST(Normalise, ContentInPartsAndNull) {
  EXPECT_THAT(
      prompt_for(
          R"([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"},
                            {"type": "refusal", "refusal": "c"}]}])")
          .text(),
      HasSubstr("user\nabc<|im_end|>"));
  EXPECT_THAT(prompt_for(R"([{"role": "user", "content": null}])").text(), HasSubstr("user\n<|im_end|>"));
  EXPECT_THAT(
      prompt_for(
          R"([{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
                            {"role": "function", "name": "f", "content": [{"type": "text", "text": "r"}]}])")
          .text(),
      HasSubstr("<tool_response>\nr\n</tool_response>"));
  EXPECT_THAT(
      prompt_for(
          R"([{"role": "user", "content": "q"}, {"role": "assistant", "content": "A", "reasoning": "why"},
                            {"role": "tool", "content": "r"}])")
          .text(),
      HasSubstr("<think>\nwhy\n</think>"));
}

TEST(Normalise, WhatCannotBeReadIsRefusedByName) {
  EXPECT_THAT(
      error_for(
          R"([{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])"),
      testing::AllOf(HasSubstr("messages[1]"), HasSubstr("images are not supported")));
  EXPECT_THAT(error_for(R"([{"role": "user", "content": [{"type": "input_image"}]}])"),
              HasSubstr("images are not supported"));
  EXPECT_THAT(error_for(R"([{"role": "user", "content": [{"type": "input_audio"}]}])"),
              HasSubstr("images are not supported"));
  EXPECT_THAT(error_for(R"([{"role": "user", "content": [{"type": "file"}]}])"), HasSubstr("messages[0]"));
  EXPECT_THAT(error_for(R"([{"role": "user", "content": 5}])"), HasSubstr("Unexpected content type."));
  EXPECT_THAT(error_for(R"([{"role": "user", "content": [{"type": "odd"}]}])"),
              HasSubstr("Unexpected item type in content."));
  EXPECT_THAT(error_for(R"([{"role": "narrator", "content": "a"}])"),
              HasSubstr("messages[0].role: \"narrator\""));
  EXPECT_THAT(error_for(R"([{"role": "tool", "content": "a"}])"), HasSubstr("messages[0]: a tool result"));
  EXPECT_THAT(error_for(R"([{"content": "a"}])"), HasSubstr("messages[0].role"));
  EXPECT_THAT(error_for(R"([{"role": "assistant", "tool_calls": [{"function": {}}]}])"),
              HasSubstr("messages[0].tool_calls[0].name"));
  EXPECT_THAT(error_for("[]"), HasSubstr("at least one message"));
  EXPECT_THAT(error_for("{}"), HasSubstr("messages: a list"));
}

TEST(Normalise, BillingHeadersAreToldFromText) {
  EXPECT_TRUE(is_billing_header("x-anthropic-billing-header: cc_version=2.1; cch=00a1f;"));
  EXPECT_TRUE(is_billing_header(" x-anthropic-billing-header: cc_version=2.1; cch=ffff;\n"));
  EXPECT_FALSE(is_billing_header("x-anthropic-billing-header: a\nYou are helpful."));
  EXPECT_FALSE(is_billing_header("You are helpful."));
}

}  // namespace
}  // namespace lily::text
