// lily bench against a peer: the document, the drawing, and peers that misbehave.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>

#include "tests/support/temp_folder.h"
#include "tests/system/program.h"

namespace lily::test {
namespace {

using Json = nlohmann::json;

class BenchAgainst : public testing::Test {
 protected:
  std::string peer(const std::string& script) {
    const auto path = folder_.path() / "peer";
    write_file(path, "#!/bin/sh\n" + script);
    ::chmod(path.c_str(), 0755);
    return path.string();
  }
  Outcome bench(const std::string& arguments) {
    return lily("bench -m models/lily-tiny --lengths 32 --rounds 2 --tokens 4 --json " + arguments);
  }
  TempFolder folder_;
};

TEST_F(BenchAgainst, APeerIsMeasuredInTurns) {
  const std::string log = (folder_.path() / "calls").string(), svg = (folder_.path() / "speed.svg").string();
  const Outcome run =
      bench("--vs " + peer("echo $1 $2 $3 >> " + log + "; echo 10; echo 30") + " --plot " + svg);
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const Json json = Json::parse(run.out);
  ASSERT_EQ(json["results"].size(), 2u);
  for (const Json& result : json["results"]) {
    EXPECT_EQ(result["peer"]["name"], "peer");
    EXPECT_EQ(result["peer"]["tok_s"]["median"], 20);
    const double own = result["tok_s"]["max"], ratio = result["ratio"]["max"];
    EXPECT_NEAR(ratio, own / 20, 1e-9 * ratio);
  }
  EXPECT_EQ(read_file(log), "prefill 32 2\ndecode 32 2\nprefill 32 2\ndecode 32 2\n");
  const std::string drawing = read_file(svg);
  EXPECT_EQ(drawing.rfind("<svg", 0), 0u);
  for (const char* part : {"prefill", "decode", ">peer<", "<circle"})
    EXPECT_NE(drawing.find(part), std::string::npos) << part;
}

TEST_F(BenchAgainst, TheMachinesOwnRatesStandBesideTheFigures) {
  const Outcome run = bench("--backend cpu");
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const Json json = Json::parse(run.out);
  EXPECT_GT(json["device"]["read_gb_s"], 0.1);
  EXPECT_GT(json["device"]["matrix_tflops"], 1e-3);
  for (const Json& result : json["results"]) {
    const bool is_decode = result["phase"] == "decode";
    const double share = result["roofline_share"],
                 rate = is_decode ? json["device"]["read_gb_s"] : json["device"]["matrix_tflops"],
                 reached = is_decode ? result["gb_s"] : result["tflops"];
    EXPECT_NEAR(share, reached / rate, 1e-9) << result["phase"];
    EXPECT_GT(share, 0);
  }
}

TEST_F(BenchAgainst, AMadeUpContextNeedsNoPrompt) {
  const Outcome run = bench("--phase decode --made-up-context");
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const Json json = Json::parse(run.out);
  ASSERT_EQ(json["results"].size(), 1u);
  EXPECT_GT(json["results"][0]["tok_s"]["min"], 0);
  EXPECT_EQ(bench("--made-up-context").exit_code, 2);  // both phases
}

TEST_F(BenchAgainst, APeerThatFailsIsToldInOneLine) {
  for (const char* script : {"exit 3", "echo fast", "true", "echo -1"}) {
    const Outcome run = bench("--phase decode --vs " + peer(script));
    EXPECT_EQ(run.exit_code, 2) << script << run.err;
    EXPECT_NE(run.err.find("peer"), std::string::npos) << run.err;
    EXPECT_EQ(run.out, "");
  }
  EXPECT_EQ(bench("--vs /nowhere/peer").exit_code, 2);
}

TEST(BenchSession, SaysBothTimesToTheFirstTokenAndTheirRatio) {
  const std::string command =
      "bench -m models/lily-tiny --threads 1 --session 3 --new 20 --lengths 400 --rounds 1 --tokens 4";
  const Outcome document = lily(command + " --json");
  ASSERT_EQ(document.exit_code, 0) << document.err;
  const Json result = Json::parse(document.out)["results"].at(0);
  const double warm = result["warm_ttft_ms"]["median"], cold = result["cold_ttft_ms"]["median"];
  EXPECT_GT(warm, 0);
  EXPECT_NEAR(result["ratio"]["median"].get<double>(), cold / warm, 1e-6 * cold / warm);
  EXPECT_GE(result["cached_tokens"], 400 - 20 - 4 - 1) << "the last turn reads what is new";

  const Outcome text = lily(command);
  ASSERT_EQ(text.exit_code, 0) << text.err;
  for (const char* part : {"turn 3 of a session of 400 tokens, 20 of them new", "first token after",
                           "after a cold read of the same prompt", "times sooner"})
    EXPECT_NE(text.out.find(part), std::string::npos) << part << " in " << text.out;
}

}  // namespace
}  // namespace lily::test
