#include "text/output_parser.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <random>

#include "tests/text/parsed_answer.h"

namespace lily::text {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using Call = ParsedOutput::Call;

constexpr std::string_view kCallLs =
    "<tool_call>\n<function=ls>\n<parameter=path>\n/tmp\n</parameter>\n</function>\n</tool_call>";

TEST(OutputParser, ThinkingThenText) {
  const auto out = parse("The user asks.\n</think>\n\n  I can.\n", thinking());
  EXPECT_EQ(out.reasoning, "The user asks.\n");
  EXPECT_EQ(out.content, "  I can.\n");  // only newlines are taken off its front
  EXPECT_THAT(out.calls, IsEmpty());
}

TEST(OutputParser, ThinkingThatTalksAboutTheSyntaxStaysThinking) {
  const auto out = parse("The format uses <tool_call> tags such as <function=foo></think>Done.", thinking());
  EXPECT_EQ(out.reasoning, "The format uses <tool_call> tags such as <function=foo>");
  EXPECT_EQ(out.content, "Done.");
  EXPECT_THAT(out.calls, IsEmpty());
  const auto direct = parse("<tool_call>\n<function=foo>\n<parameter=a>\n</think>Done.", thinking());
  EXPECT_EQ(direct.reasoning, "<tool_call>\n<function=foo>\n<parameter=a>\n");
  EXPECT_EQ(direct.content, "Done.");
  EXPECT_EQ(parse("a <tool_call>", thinking()).reasoning, "a <tool_call>");
  EXPECT_EQ(parse("\n<function=ls>\n</function> b", thinking()).reasoning, "<function=ls>\n</function> b");
}

TEST(OutputParser, ADeclaredCallEndsThinking) {
  const auto out = parse(std::string("I look. ") + std::string(kCallLs) + "\n</think>", thinking());
  EXPECT_EQ(out.reasoning, "I look. ");
  EXPECT_EQ(out.content, "");
  EXPECT_THAT(out.calls, ElementsAre(Call{"ls", R"({"path": "/tmp"})", true}));
}

TEST(OutputParser, BareFunctionTagAtTheStartOfALine) {
  const auto call =
      parse("x\n</think>\n\n<function=ls>\n<parameter=path>\n.\n</parameter>\n</function>", thinking());
  EXPECT_THAT(call.calls, ElementsAre(Call{"ls", R"({"path": "."})", true}));
  EXPECT_EQ(call.content, "");
  const auto closed = parse("Look:\n<function=ls>\n</function>\n</tool_call>\n");
  EXPECT_EQ(closed.content, "Look:\n");
  EXPECT_THAT(closed.calls, ElementsAre(Call{"ls", "{}", true}));
  for (const char* prose :
       {"use `<function=ls>` in XML", "use\n<function=ls> in XML", "<function=rm>\n</function>",
        "<function=ls", " <function=ls>\n</function>", "a\n<function=>\n", "<function=l\ns>\n</function>"}) {
    const auto text = parse(prose);
    EXPECT_EQ(text.content, prose);
    EXPECT_THAT(text.calls, IsEmpty());
  }
}

TEST(OutputParser, DoubledParameterCloser) {
  const auto out = parse(
      "<tool_call>\n<function=write_file>\n<parameter=path>\na.txt\n</parameter>\n</parameter>\n"
      "<parameter=content>\nhello\n</parameter>\n</parameter>\n</function>\n</tool_call>");
  EXPECT_THAT(out.calls, ElementsAre(Call{"write_file", R"({"path": "a.txt", "content": "hello"})", true}));
}

TEST(OutputParser, LiteralCloserInsideAValue) {
  const auto out = parse(
      "<tool_call>\n<function=write_file>\n<parameter=content>\nClose it with </parameter> in your text.\n"
      "Second line.\n</parameter>\n</function>\n</tool_call>");
  EXPECT_THAT(
      out.calls,
      ElementsAre(Call{"write_file",
                       R"({"content": "Close it with </parameter> in your text.\nSecond line."})", true}));
}

TEST(OutputParser, AnInnerPairBelongsToTheValue) {
  const auto value = [](const std::string& inner) {
    const auto out = parse("<tool_call>\n<function=write_file>\n<parameter=content>\n" + inner +
                           "\n</parameter>\n<parameter=path>\np\n</parameter>\n</function>\n</tool_call>");
    EXPECT_EQ(out.calls.size(), 1u);
    const auto arguments = parse_json(out.calls.at(0).arguments).value();
    EXPECT_EQ(arguments.value("path", ""), "p") << inner;
    return arguments["content"].get<std::string>();
  };
  for (const std::string inner :
       {"<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\nend", "<parameter=x>1</parameter>",
        "<parameter=x>\n1\n</parameter>\n<parameter=y>\n2\n</parameter>",
        "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
        "</function>\n</tool_call>\nmore", "</function> more", "</tool_call> more", "<think>x</think>",
        "<function=ls>", "a <parameter=path> b", "a </parameter> </parameter> b", "a </parameter>\n\n b"})
    EXPECT_EQ(value(inner), inner);
  // An opener without its closer takes nothing from the call.
  EXPECT_EQ(value("write <parameter=x> there"), "write <parameter=x> there");
}

TEST(OutputParser, AnUnbalancedInnerTagAtTheEnd) {
  for (const char* rest : {"", "\n", "\n<tool_call>\n<function=ls>\n</function>\n</tool_call>"}) {
    const auto out =
        parse(std::string("<tool_call>\n<function=write_file>\n<parameter=content>\nuse <parameter=x>\n"
                          "</parameter>\n</function>\n</tool_call>") +
              rest);
    ASSERT_FALSE(out.calls.empty());
    EXPECT_EQ(out.calls[0], (Call{"write_file", R"({"content": "use <parameter=x>"})", true}));
    EXPECT_EQ(out.calls.size(), std::string(rest).size() > 1 ? 2u : 1u);
    EXPECT_EQ(out.content, "");
  }
}

TEST(OutputParser, AValueLeftOpen) {
  // Ended by the next declared parameter at the start of a line.
  const auto next = parse(
      "<tool_call>\n<function=write_file>\n<parameter=path>\na\n<parameter=content>\nb\n</parameter>\n</"
      "function>\n</tool_call>");
  EXPECT_THAT(next.calls, ElementsAre(Call{"write_file", R"({"path": "a", "content": "b"})", true}));
  // Ended by the closers that follow.
  for (const char* closers :
       {"</function>\n</tool_call>", "</function>", "</tool_call>", "</function>\n</tool_call>\n", ""}) {
    const auto out = parse(std::string("<tool_call>\n<function=ls>\n<parameter=path>\na\n") + closers);
    EXPECT_THAT(out.calls, ElementsAre(Call{"ls", R"({"path": "a"})", true})) << closers;
    EXPECT_EQ(out.content, "");
  }
  const auto two = parse("<tool_call>\n<function=ls>\n<parameter=path>\na\n</function>\n</tool_call>\n" +
                         std::string(kCallLs));
  EXPECT_THAT(two.calls,
              ElementsAre(Call{"ls", R"({"path": "a"})", true}, Call{"ls", R"({"path": "/tmp"})", true}));
}

TEST(OutputParser, MissingCallClosers) {
  const auto no_function =
      parse("<tool_call>\n<function=ls>\n<parameter=path>\na\n</parameter>\n</tool_call>");
  EXPECT_THAT(no_function.calls, ElementsAre(Call{"ls", R"({"path": "a"})", true}));
  const auto neither =
      parse("<tool_call>\n<function=ls>\n<parameter=path>\na\n</parameter>\n" + std::string(kCallLs));
  EXPECT_EQ(neither.calls.size(), 2u);
  EXPECT_EQ(neither.calls[0].arguments, R"({"path": "a"})");
  const auto by_function = parse(
      "<tool_call>\n<function=ls>\n<function=get>\n<parameter=n>\n1\n</parameter>\n</function>\n</"
      "tool_call>");
  EXPECT_THAT(by_function.calls, ElementsAre(Call{"ls", "{}", true}, Call{"get", R"({"n": 1})", true}));
}

TEST(OutputParser, ValuesBecomeTypedJson) {
  const auto value = [](const char* text) {
    return parse(std::string("<tool_call><function=get><parameter=n>\n") + text +
                 "\n</parameter></function></tool_call>")
        .calls.at(0)
        .arguments;
  };
  EXPECT_EQ(value("12"), R"({"n": 12})");
  EXPECT_EQ(value("-0"), R"({"n": -0})");
  EXPECT_EQ(value("123456789012345678901234567890"), R"({"n": 123456789012345678901234567890})");
  EXPECT_EQ(value("2026-04-17"), R"({"n": "2026-04-17"})");
  EXPECT_EQ(value("007"), R"({"n": "007"})");
  EXPECT_EQ(value(""), R"({"n": ""})");
  const auto text = [](const char* written) {
    return parse(std::string("<tool_call><function=ls><parameter=path>\n") + written +
                 "\n</parameter></function></tool_call>")
        .calls.at(0)
        .arguments;
  };
  for (const char* written : {"2026-04-17", "null", "true", "12", "1e3", "{}"})
    EXPECT_EQ(text(written), std::string(R"({"path": ")") + written + "\"}");
}

TEST(OutputParser, ExactlyOneNewlineIsTakenOffEachEnd) {
  const auto value = [](const std::string& raw) {
    const auto out =
        parse("<tool_call><function=ls><parameter=path>" + raw + "</parameter></function></tool_call>");
    return parse_json(out.calls.at(0).arguments).value()["path"].get<std::string>();
  };
  EXPECT_EQ(value("\na\n"), "a");
  EXPECT_EQ(value("\n\n  a\n\n"), "\n  a\n");
  EXPECT_EQ(value("a"), "a");
  EXPECT_EQ(value("\n"), "");
  EXPECT_EQ(value("\n\n"), "");
  EXPECT_EQ(value("\n\n\n"), "\n");
  EXPECT_EQ(value(""), "");
  EXPECT_EQ(value("\n\ta\r\nb \n"), "\ta\r\nb ");
  EXPECT_EQ(value("\n\"\\\x02é\n"), "\"\\\x02é");
}

TEST(OutputParser, TwoCallsLeakNothingBetweenThem) {
  const auto out = parse("\n\n" + std::string(kCallLs) + "\n" + std::string(kCallLs) + "\n");
  EXPECT_EQ(out.content, "");
  EXPECT_EQ(out.calls.size(), 2u);
  EXPECT_EQ(out.n_complete, 2);
  std::vector<int> begun;
  for (const auto& event : out.events)
    if (event.kind == OutputEvent::Kind::call_begin) begun.push_back(event.call);
  EXPECT_THAT(begun, ElementsAre(0, 1));
}

TEST(OutputParser, BlankLinesBeforeACallAreNoContent) {
  const auto out = parse("x\n</think>\n\n" + std::string(kCallLs), thinking());
  for (const auto& event : out.events) EXPECT_NE(event.kind, OutputEvent::Kind::content);
  EXPECT_EQ(out.calls.size(), 1u);
}

TEST(OutputParser, TextBesideACall) {
  const auto before = parse("Let me look.\n\n" + std::string(kCallLs));
  EXPECT_EQ(before.content, "Let me look.\n\n");
  const auto after = parse(std::string(kCallLs) + "\nDone.");
  EXPECT_EQ(after.content, "Done.");
  const auto both = parse("A." + std::string(kCallLs) + "\nB.");
  EXPECT_EQ(both.content, "A.\nB.");
}

TEST(OutputParser, StrayClosingTagsAfterACallAreDropped) {
  for (const char* stray :
       {"</function_invocation>", "\n</function>\n</tool_call>\n", "</a></b>\n", "</think>", "</cut"}) {
    const auto out = parse(std::string(kCallLs) + stray);
    EXPECT_EQ(out.content, "") << stray;
    EXPECT_EQ(out.calls.size(), 1u);
  }
  EXPECT_EQ(parse(std::string(kCallLs) + "</b> text").content, "</b> text");
  EXPECT_EQ(parse(std::string(kCallLs) + "<b>").content, "<b>");
  EXPECT_EQ(parse(std::string(kCallLs) + "<").content, "<");
  EXPECT_EQ(parse(std::string(kCallLs) + "</ b>").content, "</ b>");
}

TEST(OutputParser, CallsSwitchedOffAreText) {
  OutputOptions off;
  off.calls = false;
  const auto out = parse(kCallLs, off);
  EXPECT_EQ(out.content, kCallLs);
  EXPECT_THAT(out.calls, IsEmpty());
}

TEST(OutputParser, AnUndeclaredFunctionIsACallIfFullyFormed) {
  const auto out = parse(
      "<tool_call>\n<function=teleport>\n<parameter=to>\nmoon\n</parameter>\n</function>\n</tool_call>");
  EXPECT_THAT(out.calls, ElementsAre(Call{"teleport", R"({"to": "moon"})", true}));
  for (const char* prose : {"<tool_call>\n<function=teleport> is a tag", "<tool_call> <function=teleport>",
                            "<tool_call><function=x></tool_call>"})
    EXPECT_EQ(parse(prose).content, prose);
  // It is known after the first part of a call, not at the end.
  OutputParser parser(test_tools(), {});
  std::vector<OutputEvent> events;
  parser.push_tag(ControlTag::call_open, events);
  parser.push_text("<function=teleport>\n<parameter=to>", events);
  ASSERT_FALSE(events.empty());
  EXPECT_EQ(events[0].text, "teleport");
}

TEST(OutputParser, WhatNeverBecomesACallIsContent) {
  for (const char* prose : {"<tool_call> is how it begins, then ordinary prose.", "<tool_call>",
                            "<tool_call>\n", "a <tool_call><tool_call> b", "<tool_call>{not json}",
                            "<tool_call>{\"a\": 1}", "<tool_call>{\"name\": \"ls\"", "</tool_call> b",
                            "<tool_call>{\"name\": \"ls\", \"arguments\": [1]} x",
                            "<tool_call>\n<parameter=a>\n1\n</parameter>"}) {
    const auto out = parse(prose);
    EXPECT_EQ(out.content, prose);
    EXPECT_THAT(out.calls, IsEmpty());
  }
}

TEST(OutputParser, AJsonObjectIsACall) {
  const Call expected{"ls", R"({"path": "a}\"", "all": [1]})", true};
  EXPECT_THAT(parse(R"(<tool_call>
{"name": "ls", "arguments": {"path": "a}\"", "all": [1]}}
</tool_call>)")
                  .calls,
              ElementsAre(expected));
  EXPECT_THAT(
      parse(R"(<tool_call>{"arguments": "{\"path\": \"a}\\\"\", \"all\": [1]}", "name": "ls"}</tool_call>
)")
          .calls,
      ElementsAre(expected));
  const auto in_thinking = parse(R"(hm <tool_call>{"name": "ls", "arguments": {}}</tool_call>)", thinking());
  EXPECT_EQ(in_thinking.reasoning, "hm ");
  EXPECT_THAT(in_thinking.calls, ElementsAre(Call{"ls", "{}", true}));
  EXPECT_THAT(parse(R"(hm <tool_call>{"name": "rm", "arguments": {}}</tool_call>)", thinking()).calls,
              IsEmpty());
  const auto followed = parse(R"(<tool_call>{"name": "ls", "arguments": {}}x)");
  EXPECT_EQ(followed.content, "x");
  EXPECT_EQ(followed.calls.size(), 1u);
}

TEST(OutputParser, ALongStringStreamsInFragments) {
  const std::string text(2000, 'y');
  const std::string answer =
      "<tool_call>\n<function=ls>\n<parameter=path>\n" + text + "\n</parameter>\n</function>\n</tool_call>";
  const auto out = parse_in_pieces(answer, 20, {}, OutputEnd::stop);
  int n_fragments = 0;
  ASSERT_FALSE(out.events.empty());
  EXPECT_EQ(out.events[0], (OutputEvent{OutputEvent::Kind::call_begin, 0, "ls"}));
  for (const auto& event : out.events) n_fragments += event.kind == OutputEvent::Kind::call_arguments;
  EXPECT_GT(n_fragments, 20);
  EXPECT_EQ(out.calls.at(0).arguments, "{\"path\": \"" + text + "\"}");
}

TEST(OutputParser, TheCallOpensWhenItsNameIsComplete) {
  OutputParser parser(test_tools(), {});
  std::vector<OutputEvent> events;
  parser.push_tag(ControlTag::call_open, events);
  parser.push_text("\n<function=ls", events);
  EXPECT_THAT(events, IsEmpty());
  parser.push_text(">", events);
  EXPECT_THAT(events, ElementsAre(OutputEvent{OutputEvent::Kind::call_begin, 0, "ls"}));
}

TEST(OutputParser, ToolsDoNotStopStreaming) {
  std::string answer;
  for (int i = 0; i < 200; ++i) answer += "word ";
  const auto out = parse_in_pieces(answer, 5, {}, OutputEnd::stop);
  EXPECT_EQ(out.content, answer);
  EXPECT_EQ(out.events.size(), 200u);
}

TEST(OutputParser, MissingRequiredAndRepeatedParameters) {
  EXPECT_THAT(
      parse(
          "<tool_call>\n<function=write_file>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>")
          .calls,
      ElementsAre(Call{"write_file", R"({"path": "a"})", true}));
  EXPECT_THAT(parse("<tool_call>\n<function=ls>\n<parameter=path>\na\n</parameter>\n<parameter=path>\nb\n</"
                    "parameter>\n</function>\n</tool_call>")
                  .calls,
              ElementsAre(Call{"ls", R"({"path": "a"})", true}));
}

TEST(OutputParser, CutByLength) {
  const auto in_thinking = parse("still thinking", thinking(), OutputEnd::length);
  EXPECT_EQ(in_thinking.reasoning, "still thinking");
  EXPECT_EQ(in_thinking.content, "");
  const auto cut = [](const char* answer) { return parse(answer, {}, OutputEnd::length); };
  EXPECT_THAT(cut("<tool_call>\n<function=write_file>\n<parameter=content>\nhalf").calls,
              ElementsAre(Call{"write_file", R"({"content": "half)", false}));
  EXPECT_THAT(cut("<tool_call>\n<function=get>\n<parameter=n>\n12").calls,
              ElementsAre(Call{"get", "", false}));
  EXPECT_THAT(cut("<tool_call>\n<function=ls>\n<parameter=path>\na\n</parameter>\n").calls,
              ElementsAre(Call{"ls", R"({"path": "a)", false}));
  EXPECT_EQ(cut(std::string(kCallLs).c_str()).n_complete, 1);
  EXPECT_EQ(cut("a <tool_call>\n").content, "a <tool_call>\n");
  EXPECT_EQ(cut("a\n<func").content, "a\n<func");
}

TEST(OutputParser, StoppedInsideACallClosesIt) {
  EXPECT_THAT(parse("<tool_call>\n<function=write_file>\n<parameter=content>\nhalf").calls,
              ElementsAre(Call{"write_file", R"({"content": "half"})", true}));
  EXPECT_THAT(parse("<tool_call>\n<function=get>\n<parameter=n>\n12").calls,
              ElementsAre(Call{"get", R"({"n": 12})", true}));
  EXPECT_THAT(parse("<tool_call>\n<function=ls>\n").calls, ElementsAre(Call{"ls", "{}", true}));
  EXPECT_THAT(parse("<tool_call>\n<function=ls>\n<parameter=path>\na</param").calls,
              ElementsAre(Call{"ls", R"({"path": "a</param"})", true}));
  EXPECT_THAT(parse("<function=ls>").calls, ElementsAre(Call{"ls", "{}", true}));
}

TEST(OutputParser, ThinkingOff) {
  const auto out = parse("Paris.");
  EXPECT_EQ(out.content, "Paris.");
  EXPECT_EQ(out.reasoning, "");
  EXPECT_EQ(parse("I write <think> and </think> here").content, "I write <think> and  here");
}

TEST(OutputParser, OnlyTheTokenEndsThinking) {
  const std::string quoted = std::string("the template has ") + kQuote + "</think> in it, so\n";
  const auto out = parse(quoted + "</think>\n\nYes", thinking());
  EXPECT_EQ(out.reasoning, "the template has </think> in it, so\n");
  EXPECT_EQ(out.content, "Yes");
  EXPECT_EQ(parse(std::string("so") + kQuote + "</think>\n\nYes", thinking()).content, "");
  EXPECT_EQ(parse(std::string("a ") + kQuote + "<tool_call> b").content, "a <tool_call> b");
}

TEST(OutputParser, ASecondCloserIsDropped) {
  const auto out = parse("cut here</think>\n\n</think>\n\nThe answer</think>.", thinking());
  EXPECT_EQ(out.reasoning, "cut here");
  EXPECT_EQ(out.content, "The answer.");
}

TEST(OutputParser, EmptyThinkingIsNone) {
  const auto out = parse("\n\n</think>\n\nHi", thinking());
  for (const auto& event : out.events) EXPECT_NE(event.kind, OutputEvent::Kind::reasoning);
  EXPECT_EQ(out.content, "Hi");
}

TEST(OutputParser, ContinuedTextKeepsItsNewlines) {
  OutputOptions options;
  options.continues_text = true;
  EXPECT_EQ(parse("\n\n- item", options).content, "\n\n- item");
  EXPECT_EQ(parse("\n\n- item").content, "- item");
}

TEST(OutputParser, StopStringsActOnVisibleTextOnly) {
  OutputOptions options = thinking();
  options.stop = {"STOP", "\n\n\n"};
  const auto out =
      parse("thinking STOP\n</think>\n\nvisible STO? and STOP hidden" + std::string(kCallLs), options);
  EXPECT_EQ(out.reasoning, "thinking STOP\n");
  EXPECT_EQ(out.content, "visible STO? and ");
  EXPECT_THAT(out.calls, IsEmpty());
  const auto in_call = parse(
      "</think><tool_call><function=ls><parameter=path>STOP</parameter></function></tool_call>", options);
  EXPECT_THAT(in_call.calls, ElementsAre(Call{"ls", R"({"path": "STOP"})", true}));
  // The head of a stop string before a call is text.
  EXPECT_EQ(parse("</think>x STO" + std::string(kCallLs) + "P", options).content, "x STOP");
}

TEST(OutputParser, WorkIsLinear) {
  const size_t n = 200'000;
  const auto repeated = [&](std::string_view unit) {
    std::string out;
    while (out.size() < n) out += unit;
    return out;
  };
  const std::string open = "<tool_call>\n<function=write_file>\n<parameter=content>\n";
  const auto begin = std::chrono::steady_clock::now();
  for (const std::string& answer :
       {repeated("a"), repeated("\n"), repeated("<"), repeated("\n<function=ls>"), repeated("<tool_call>"),
        repeated("<tool_call>{"), std::string(kCallLs) + repeated("</a>\n"), open + repeated("</parameter>"),
        open + repeated("</parameter>x"), open + repeated("<parameter=x></parameter></function>"),
        open + repeated("</function></tool_call>"), open + repeated("\n"),
        "<tool_call>{\"name\": \"ls\", \"arguments\": {\"a\": \"" + repeated("x")}) {
    const auto out = parse_in_pieces(answer, 3, {}, OutputEnd::stop);
    EXPECT_GE(out.content.size() + out.calls.size(), 0u);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin,
            std::chrono::seconds(20));  // minutes if it were quadratic
}

// Random mixtures of everything that means something, cut at random.
TEST(OutputParser, SegmentationDoesNotMatter) {
  const std::vector<std::string> parts = {"<tool_call>",
                                          "</tool_call>",
                                          "<think>",
                                          "</think>",
                                          "<function=ls>",
                                          "<function=write_file>",
                                          "<function=odd>",
                                          "</function>",
                                          "<parameter=path>",
                                          "<parameter=content>",
                                          "<parameter=odd>",
                                          "</parameter>",
                                          "\n",
                                          "\n",
                                          " ",
                                          "text",
                                          "</",
                                          "<",
                                          ">",
                                          "<function=",
                                          "<parameter",
                                          "{\"name\": \"ls\", \"arguments\": {}}",
                                          "{",
                                          "}",
                                          "\"",
                                          "\\",
                                          "STOP",
                                          "STO",
                                          "é",
                                          "12"};
  std::mt19937 random(99);
  for (int round = 0; round < 3000; ++round) {
    std::string answer;
    for (size_t n = random() % 24; n > 0; --n) answer += parts[random() % parts.size()];
    OutputOptions options;
    options.starts_in_thinking = random() % 2;
    options.continues_text = random() % 4 == 0;
    options.calls = random() % 8 != 0;
    if (random() % 2) options.stop = {"STOP", "x"};
    const auto end = random() % 3 ? OutputEnd::stop : OutputEnd::length;
    const auto out = parse(answer, options, end);
    for (const auto& call : out.calls) {
      if (!call.complete) continue;
      const auto arguments = parse_json(call.arguments);
      EXPECT_TRUE(arguments && arguments->is_object()) << call.arguments << " of " << answer;
    }
    if (testing::Test::HasFailure()) {
      FAIL() << "seed 99, round " << round << ": " << answer;
    }
  }
}

}  // namespace
}  // namespace lily::text
