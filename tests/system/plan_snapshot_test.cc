// Plans are reviewed as text: what a change does to ops, stages and bytes shows in the diff of
// tests/system/plans/*.txt. After a change that is meant, scripts/plan-snapshots writes them anew.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "tests/system/program.h"

namespace lily::test {
namespace {

namespace fs = std::filesystem;

std::string text_of(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// A snapshot's first line is the command that prints the rest.
void expect_same(const fs::path& snapshot) {
  const std::string text = text_of(snapshot);
  const size_t end = text.find('\n');
  ASSERT_NE(end, std::string::npos) << snapshot << " is empty";
  const std::string command = text.substr(0, end);
  const std::string prefix = "# lily ";
  ASSERT_EQ(command.rfind(prefix, 0), 0u) << snapshot << ": " << command;
  const Outcome run = lily(command.substr(prefix.size()));
  if (run.exit_code != 0 && run.err.find("is not available here") != std::string::npos)
    GTEST_SKIP() << run.err;  // a backend that this build leaves out
  ASSERT_EQ(run.exit_code, 0) << run.err;

  const std::vector<std::string> expected = lines_of(text.substr(end + 1)), found = lines_of(run.out);
  for (size_t i = 0; i < std::max(expected.size(), found.size()); ++i) {
    ASSERT_LT(i, found.size()) << snapshot << " goes on with: " << expected[i];
    ASSERT_LT(i, expected.size()) << snapshot << " ends before: " << found[i];
    ASSERT_EQ(found[i], expected[i]) << snapshot << ", line " << i + 2
                                     << "; if the change is meant, run scripts/plan-snapshots";
  }
}

class PlanSnapshot : public testing::TestWithParam<fs::path> {};

TEST_P(PlanSnapshot, ThePlanIsTheOneInTheFile) { expect_same(GetParam()); }

std::vector<fs::path> snapshots() {
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(LILY_PLAN_SNAPSHOTS)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  return paths;
}

std::string name_of(const testing::TestParamInfo<fs::path>& info) {
  std::string name = info.param.stem().string();
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Files, PlanSnapshot, testing::ValuesIn(snapshots()), name_of);

TEST(PlanSnapshots, EveryKindOfStepIsThere) {
  for (const char* backend : {"reference", "cpu", "metal-emulated"})
    for (const char* step : {"decode-4096", "decode-20000", "prefill-16", "prefill-512"})
      EXPECT_TRUE(fs::exists(fs::path(LILY_PLAN_SNAPSHOTS) / (std::string(backend) + "-" + step + ".txt")))
          << backend << " " << step;
}

}  // namespace
}  // namespace lily::test
