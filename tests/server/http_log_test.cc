// What the log and the metrics say of requests, and what they never say.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include "tests/server/log_lines.h"
#include "tests/server/scripted_server.h"

namespace lily::test {
namespace {

class HttpLog : public ScriptedServer {};

TEST_F(HttpLog, APathCannotForgeALineOfTheLog) {
  const LogLines lines;
  start();
  EXPECT_EQ(ask("GET", "/a%0aFAKE%20LINE").status, 404);
  stop();
  const std::string log = lines.all();
  EXPECT_NE(log.find("FAKE"), std::string::npos);
  EXPECT_EQ(log.find("\nFAKE"), std::string::npos) << log;
}

TEST_F(HttpLog, TheLogTellsWhereAPromptDiffersAndItsTextOnlyWhereThatIsAskedFor) {
  for (const bool log_misses : {false, true}) {
    start({}, {.log_misses = log_misses});
    const LogLines log;
    const std::string head =
        R"({"temperature": 0, "reasoning_effort": "none", "messages": [{"role": "user", "content": ")";
    ask("POST", "/v1/chat/completions", head + "count the river\"}]}");
    ask("POST", "/v1/chat/completions", head + "count the apple\"}]}");
    stop();
    const std::string lines = log.all();
    EXPECT_NE(lines.find("differs from the nearest one remembered at token"), std::string::npos) << lines;
    for (const char* text : {"count the", "river", "apple"})
      EXPECT_EQ(lines.find(text) != std::string::npos, log_misses) << lines;
  }
}

TEST_F(HttpLog, TheCachesRatesAreAmongTheMetrics) {
  start();
  chat();
  chat();
  for (const char* line : {"cache_hits_total 1", "cache_misses_total 1", "cache_evictions_total 0"})
    EXPECT_TRUE(eventually([&] {
      return service_->metrics().find(std::string("\nlily_") + line + "\n") != std::string::npos;
    })) << line;
  EXPECT_TRUE(eventually([&] {
    return service_->metrics().find("\nlily_cache_hit_ratio 0.") != std::string::npos;
  })) << service_->metrics();
}

TEST_F(HttpLog, TheLogSaysWhatARequestCostAndNotWhatItSaid) {
  const LogLines lines;
  start();
  const int n_prompt = chat()["usage"]["prompt_tokens"];
  chat();
  ask("POST", "/v1/chat/completions", kHelloStreamed);
  ask("GET", "/health");
  executor_->fail_wait[static_cast<int>(executor_->steps().size())] = "the device stumbled";
  ask("POST", "/v1/chat/completions", kHelloStreamed);
  stop();
  const std::string log = lines.all();
  EXPECT_THAT(log, testing::ContainsRegex(fmt::format(
                       "127.0.0.1 POST /v1/chat/completions 200 [0-9]+ ms, prompt {} \\(0 cached\\), "
                       "[0-9]+ new, stop\n",
                       n_prompt)));
  EXPECT_THAT(log, testing::ContainsRegex(
                       fmt::format("200 [0-9]+ ms, prompt {} \\([1-9][0-9]* cached\\)", n_prompt)));
  EXPECT_THAT(log, testing::ContainsRegex("GET /health 200 [0-9]+ ms\n"));
  EXPECT_THAT(log, testing::ContainsRegex("POST /v1/chat/completions 200 [0-9]+ ms, failed\n"));
  EXPECT_EQ(log.find("hello"), std::string::npos) << log;
  EXPECT_EQ(log.find("four"), std::string::npos) << log;
}

TEST_F(HttpLog, AnIgnoredFieldIsLoggedOnce) {
  const LogLines lines;
  start();
  for (const char* more : {R"("oddity": 1, )", R"("oddity": 2, "novelty": 1, )"})
    ask("POST", "/v1/chat/completions", "{" + (more + std::string(kHello).substr(1)));
  stop();
  const std::string log = lines.all();
  EXPECT_THAT(log, testing::HasSubstr("ignored: oddity\n"));
  EXPECT_THAT(log, testing::HasSubstr("ignored: novelty\n"));
}

TEST_F(HttpLog, AFailedStreamCountsAsAFailure) {
  start();
  const auto counts = [&](const std::string& result, int n) {
    return eventually([&] {
      return service_->metrics().find(fmt::format("lily_http_requests_total{{result=\"{}\"}} {}\n", result,
                                                  n)) != std::string::npos;
    });
  };
  chat();
  EXPECT_TRUE(counts("ok", 1));
  executor_->fail_wait[static_cast<int>(executor_->steps().size())] = "the device stumbled";
  ask("POST", "/v1/chat/completions", kHelloStreamed);
  EXPECT_TRUE(counts("failed", 1));
  EXPECT_TRUE(counts("ok", 1));
}

TEST_F(HttpLog, AFailureIsLoggedWithTheIdThatItsClientGot) {
  for (const char* body : {kHello, kHelloStreamed}) {
    SCOPED_TRACE(body);
    const LogLines lines;
    start();
    executor_->fail_wait[static_cast<int>(executor_->steps().size())] = "the device stumbled";
    Connection client(port_);
    client.post("/v1/chat/completions", body);
    const std::string answer = client.read_until("stumbled");
    const std::string name = "x-request-id: ";
    const size_t at = answer.find(name);
    ASSERT_NE(at, std::string::npos) << answer;
    EXPECT_EQ(answer.find(name, at + 1), std::string::npos) << "one id: " << answer;
    const std::string id = answer.substr(at + name.size(), answer.find('\r', at) - at - name.size());
    stop();
    EXPECT_THAT(lines.all(), testing::HasSubstr(id + ": "));
  }
}

}  // namespace
}  // namespace lily::test
