// kill -9 at random moments: a pull ends whole and verified or not at all, and what has arrived is not
// fetched again.
#include <chrono>
#include <csignal>
#include <optional>
#include <random>
#include <thread>

#include "tests/hub/rig.h"

namespace lily::test {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

constexpr int kConnections = 4;
// What a connection may carry when the client dies: two writes of the hub.
constexpr uint64_t kInFlightBytes = 2 * 16384;
// config.json and the index are looked at first and stored when both are here.
constexpr uint64_t kSmallBytes = 40'000;

class KilledPull : public PullRig {
 protected:
  // Whether the child had ended before the signal came.
  bool run_and_kill(int after_ms, std::optional<uint64_t> n_sent_before = {}) {
    Child child({"pull", kTestRepository, "--piece-bytes", "2000000"}, environment());
    // The moment counts from the first byte, where there is one to come: a busy machine starts programs
    // slowly.
    for (int waited_ms = 0; n_sent_before && hub.n_sent() == *n_sent_before && waited_ms < 2000; ++waited_ms)
      std::this_thread::sleep_for(milliseconds(1));
    std::this_thread::sleep_for(milliseconds(after_ms));
    child.send(SIGKILL);
    const int ended = child.wait();
    EXPECT_TRUE(ended == -SIGKILL || ended == 0) << child.err();
    expect_nothing_half();
    return ended == 0;
  }

  void kill_while_fetching(int n_kills, uint32_t seed) {
    std::mt19937 random(seed);
    std::uniform_int_distribution<int> moment_ms(1, 200);
    const uint64_t n_needed = hub.n_bytes() - hub.size("MODEL_CARD.md") - hub.size(".gitattributes");
    // So slow that the last kill still finds work to interrupt: a run lasts 100 ms on average.
    hub.set({.bytes_per_s = static_cast<double>(n_needed) / (n_kills * 0.1 * kConnections)});
    int n_ended = 0;
    for (int i = 0; i < n_kills; ++i) n_ended += run_and_kill(moment_ms(random), hub.n_sent());
    const uint64_t n_sent_to_the_dead = hub.n_sent();
    EXPECT_GT(n_sent_to_the_dead, n_needed / 4);
    hub.set({});
    const Ended run = pull();
    ASSERT_EQ(run.exit_code, 0) << run.err;
    expect_whole();
    const uint64_t n_again = hub.n_sent() - std::min(hub.n_sent(), n_needed);
    RecordProperty("bytes_fetched_twice", std::to_string(n_again));
    std::printf("%d kills, %d of them too late: %llu bytes needed, %llu sent to the killed, %llu in all\n",
                n_kills, n_ended, static_cast<unsigned long long>(n_needed),
                static_cast<unsigned long long>(n_sent_to_the_dead),
                static_cast<unsigned long long>(hub.n_sent()));
    EXPECT_LE(n_again, static_cast<uint64_t>(n_kills) * (kConnections * kInFlightBytes + kSmallBytes));
    EXPECT_LT(n_ended, n_kills);
  }

  // Everything is here; what is interrupted is verifying and giving names.
  void kill_while_finishing(int n_kills, uint32_t seed) {
    std::mt19937 random(seed);
    std::uniform_int_distribution<int> moment_ms(0, 150);
    ASSERT_EQ(pull().exit_code, 0);
    hub.forget_sent();
    for (int i = 0; i < n_kills; ++i) {
      fs::remove_all(repository() / "snapshots");
      fs::remove_all(repository() / "refs");
      run_and_kill(moment_ms(random));
    }
    EXPECT_EQ(pull().exit_code, 0);
    EXPECT_EQ(hub.n_sent(), 0u);
    expect_whole();
  }
};

TEST_F(KilledPull, GoesOnAfterAFewTimes) {
  kill_while_fetching(6, 1);
  kill_while_finishing(4, 2);
}

TEST_F(KilledPull, GoesOnAfterFiftyTimes) {
  kill_while_fetching(50, 3);
  kill_while_finishing(50, 4);
}

}  // namespace
}  // namespace lily::test
