// lily pull behind a proxy: which requests go through it, and what its refusals look like.
#include "tests/hub/rig.h"
#include "tests/hub/test_proxy.h"

namespace lily::test {
namespace {

class ProxiedPull : public PullRig {
 protected:
  // A hub that can be reached through the proxy only: nothing else knows these names.
  void move_hub_away() {
    extra["HF_ENDPOINT"] = "http://hub.invalid:" + std::to_string(hub.port());
    hub.set({.store_host = "store.invalid"});
  }
};

TEST_F(ProxiedPull, EveryRequestGoesThroughTheProxy) {
  const TestProxy proxy;
  move_hub_away();
  extra["http_proxy"] = "http://" + proxy.host_and_port();
  const Ended run = pull();
  ASSERT_EQ(run.exit_code, 0) << run.err;
  expect_whole();
  int n_to_hub = 0, n_to_store = 0;
  for (const std::string& line : proxy.asked()) {
    n_to_hub += line.find("http://hub.invalid:") != std::string::npos;
    n_to_store += line.find("http://store.invalid:") != std::string::npos;
  }
  EXPECT_GT(n_to_hub, 5);
  EXPECT_GE(n_to_store, 11) << "pieces of 2 MB";
}

TEST_F(ProxiedPull, NamesInNoProxyAreAskedDirectly) {
  const TestProxy proxy;
  move_hub_away();
  extra["http_proxy"] = "http://" + proxy.host_and_port();
  for (const char* name : {"no_proxy", "NO_PROXY"}) {
    extra.erase("no_proxy");
    extra[name] = "hub.invalid,store.invalid";
    const Ended run = pull({"--retries", "0"});
    EXPECT_EQ(run.exit_code, 1);
    EXPECT_NE(last_line(run.err).find("resolve host: hub.invalid"), std::string::npos) << run.err;
  }
  EXPECT_TRUE(proxy.asked().empty());
}

// As in curl: in capitals, a web server would set it for its scripts from a header of its client (httpoxy).
TEST_F(ProxiedPull, TheProxyForPlainHttpIsNamedInSmallLettersOnly) {
  const TestProxy proxy;
  move_hub_away();
  extra["HTTP_PROXY"] = "http://" + proxy.host_and_port();
  EXPECT_EQ(pull({"--retries", "0"}).exit_code, 1);
  EXPECT_TRUE(proxy.asked().empty());
}

// The token may be said in the clear to this machine, so it must not leave it on the way there.
TEST_F(ProxiedPull, ThisMachineIsAskedPastTheProxy) {
  const TestProxy proxy;
  hub.set({.token = "hf_secret"});
  extra["HF_TOKEN"] = "hf_secret";
  extra["http_proxy"] = "http://" + proxy.host_and_port();
  const Ended run = pull();
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(proxy.asked().empty());
  EXPECT_FALSE(proxy.was_token_shown());
}

TEST_F(ProxiedPull, ATokenForAPlainHubElsewhereIsNotShownToTheProxy) {
  const TestProxy proxy;
  move_hub_away();
  extra["HF_TOKEN"] = "hf_secret";
  extra["http_proxy"] = "http://" + proxy.host_and_port();
  const Ended run = pull();
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_NE(run.err.find("the access token is not sent"), std::string::npos) << run.err;
  EXPECT_FALSE(proxy.was_token_shown());
}

TEST_F(ProxiedPull, AnHttpsHubIsAskedForByConnect) {
  const TestProxy proxy;  // refuses tunnels with 502
  extra["HF_ENDPOINT"] = "https://hub.invalid";
  for (const char* name : {"https_proxy", "HTTPS_PROXY"}) {
    extra.erase("https_proxy");
    extra[name] = "http://" + proxy.host_and_port();
    const size_t n_before = proxy.asked().size();
    const Ended run = pull({"--retries", "0"});
    EXPECT_EQ(run.exit_code, 1);
    EXPECT_NE(last_line(run.err).find("502"), std::string::npos) << run.err;
    ASSERT_EQ(proxy.asked().size(), n_before + 1) << name;
    EXPECT_EQ(proxy.asked().back(), "CONNECT hub.invalid:443 HTTP/1.1");
  }
  expect_nothing_half();
}

TEST_F(ProxiedPull, AProxyThatWantsAPasswordSaysSoAndTakesIt) {
  const TestProxy proxy("Basic bmFtZTpwYXNz");  // name:pass
  move_hub_away();
  extra["http_proxy"] = extra["https_proxy"] = "http://" + proxy.host_and_port();
  const auto expect_question = [&] {
    const Ended run = pull();
    EXPECT_EQ(run.exit_code, 1);
    EXPECT_NE(last_line(run.err).find("the proxy wants a name and a password"), std::string::npos) << run.err;
  };
  expect_question();
  const std::string endpoint = extra["HF_ENDPOINT"];
  extra["HF_ENDPOINT"] = "https://hub.invalid";
  expect_question();
  EXPECT_EQ(proxy.asked().size(), 2u) << "asking again is no use";
  extra["HF_ENDPOINT"] = endpoint;
  extra["http_proxy"] = "http://name:pass@" + proxy.host_and_port();
  const Ended run = pull({"-v", "-v"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ((run.out + run.err).find("name:pass"), std::string::npos);
  expect_whole();
}

TEST_F(ProxiedPull, NoProxyThereIsOneClearLine) {
  extra["HF_ENDPOINT"] = "https://hub.invalid";
  extra["https_proxy"] = "http://127.0.0.1:1";
  Ended run = pull({"--retries", "0"});
  EXPECT_EQ(run.exit_code, 1);
  EXPECT_NE(last_line(run.err).find("connect to 127.0.0.1 port 1"), std::string::npos) << run.err;
  extra["https_proxy"] = "http://proxy.invalid:3128";
  run = pull();
  EXPECT_EQ(run.exit_code, 1);
  EXPECT_NE(last_line(run.err).find("resolve proxy: proxy.invalid"), std::string::npos) << run.err;
}

}  // namespace
}  // namespace lily::test
