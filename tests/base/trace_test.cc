#include "base/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "tests/support/error_of.h"
#include "tests/support/temp_folder.h"

namespace lily {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;

TEST(Trace, EventsAreWhatTheFormatAsksFor) {
  const test::TempFolder folder;
  const auto path = folder.path() / "trace.json";
  const auto begin = Trace::Clock::now();
  {
    Trace trace(path);
    trace.add(Trace::Track::steps, "decode", begin + 1ms, begin + 3ms, R"({"rows": 1})");
    trace.add(Trace::Track::ops, "linear, layer 3", begin + 1ms, begin + 2ms);
  }
  std::vector<json> events;
  for (const json& event : json::parse(test::read_file(path)))
    if (event["ph"] == "X") events.push_back(event);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0]["name"], "decode");
  EXPECT_EQ(events[0]["args"]["rows"], 1);
  EXPECT_DOUBLE_EQ(events[0]["dur"], 2000);
  EXPECT_DOUBLE_EQ(events[1]["dur"], 1000);
  EXPECT_DOUBLE_EQ(events[0]["ts"], events[1]["ts"]);
  EXPECT_NE(events[0]["tid"], events[1]["tid"]);
}

TEST(Trace, AFileThatCannotBeWrittenIsNamed) {
  EXPECT_THAT(test::error_of([] { Trace trace("/nowhere/trace.json"); }),
              testing::HasSubstr("/nowhere/trace.json"));
}

}  // namespace
}  // namespace lily
