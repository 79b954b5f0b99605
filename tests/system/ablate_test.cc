// lily ablate: what is measured, what is not and why, and the drawing.
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "tests/support/temp_folder.h"
#include "tests/system/program.h"

namespace lily::test {
namespace {

using Json = nlohmann::json;

Outcome ablate(const std::string& arguments) {
  return lily("ablate -m models/lily-tiny --backend cpu --threads 1 --rounds 2 --tokens 2 " + arguments);
}

TEST(Ablate, EveryMechanismIsMeasuredOrSaysWhyNot) {
  TempFolder folder;
  const std::string svg = (folder.path() / "gains.svg").string();
  const Outcome run = ablate("--prompts 24 --contexts 600 --json --plot " + svg);
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const Json rows = Json::parse(run.out);
  std::map<std::string, Json> by_id;
  for (const Json& row : rows) by_id[row["id"]] = row;
  for (const char* id : {"P1", "P2", "P3", "P4", "P5", "P6", "D1", "D2", "D3", "D4", "D5", "D6", "D7"}) {
    ASSERT_TRUE(by_id.contains(id)) << id;
    const Json& row = by_id[id];
    EXPECT_EQ(row["phase"], id[0] == 'P' ? "prefill" : "decode") << id;
    if (row["gain"].is_null()) {
      EXPECT_FALSE(row["why"].get<std::string>().empty()) << id;
      EXPECT_TRUE(row["on_tok_s"].is_null()) << id;
      continue;
    }
    EXPECT_TRUE(row["applicable"].get<bool>()) << id;
    EXPECT_GT(row["on_tok_s"].get<double>(), 0) << id;
    EXPECT_GT(row["off_tok_s"].get<double>(), 0) << id;
    EXPECT_LE(row["gain_min"], row["gain"]) << id;
    EXPECT_LE(row["gain"], row["gain_max"]) << id;
  }
  for (const char* id : {"P1", "P4", "D3", "D4", "D6", "D7"})
    EXPECT_TRUE(by_id[id]["gain"].is_number()) << id;
  EXPECT_FALSE(by_id["P2"]["applicable"].get<bool>());
  EXPECT_EQ(by_id["int8"]["phase"], "prefill");
  EXPECT_GT(by_id["int8"]["on_tok_s"].get<double>(), 0);
  // The prompt is one chunk either way.
  EXPECT_TRUE(by_id["P5"]["applicable"].get<bool>());
  EXPECT_TRUE(by_id["P5"]["gain"].is_null());
  const std::string drawing = read_file(svg);
  EXPECT_EQ(drawing.rfind("<svg", 0), 0u);
  for (const char* part : {"P4 ", "D7 ", "<rect", "</svg>"})
    EXPECT_NE(drawing.find(part), std::string::npos) << part;
}

TEST(Ablate, TheTableNamesWhatDoesNotApply) {
  const Outcome run = ablate("--only P2,d7 --contexts 8");
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_NE(run.out.find("not applicable on this backend: "), std::string::npos) << run.out;
  EXPECT_NE(run.out.find("not measured: acts from a context of"), std::string::npos) << run.out;
}

TEST(Ablate, OnlyWhatIsNamedIsCompared) {
  const auto ids_of = [](const std::string& only) {
    const Outcome run = ablate("--prompts 16 --json --only " + only);
    std::string ids;
    if (run.exit_code != 0) return run.err;
    for (const Json& row : Json::parse(run.out)) ids += row["id"].get<std::string>() + " ";
    return ids;
  };
  EXPECT_EQ(ids_of("int8"), "int8 ");
  EXPECT_EQ(ids_of("P2,int8,D5"), "P2 D5 int8 ");
}

TEST(Ablate, AMechanismThatDoesNotExistIsNamed) {
  const Outcome run = ablate("--only P9");
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_NE(run.err.find("P9"), std::string::npos) << run.err;
}

}  // namespace
}  // namespace lily::test
